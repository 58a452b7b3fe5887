"""A draft window at a plain position: which drafts would be taken, and the rows of all of them at once, without moving the session.

Plain is: inside a grammar, and nothing but the matcher and what is counted beside it moves by a token. No stop id, no complete grammar of a lazy
request (which may be left, or counted), nothing that raises. What is not plain is left to the session, token by token.

Invariants:
- Position, gate, journal and kept row are not touched, and the matcher stands behind each call where it stood before it, whatever was raised.
- What is answered here is what the session answers token by token; a property test holds each against the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.leading import FIRST
from vllm_lazy_grammar.core.rows import ALL
from vllm_lazy_grammar.errors import LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.journal import Position
    from vllm_lazy_grammar.core.leading import LeadingOut
    from vllm_lazy_grammar.core.masks import Masks
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.walk import Walk

_INSIDE = Phase.INSIDE


class Window:
    """The windows of one session.

    Args:
        walk: where the session stands.
        inside: what the grammar takes.
        masks: makes the rows.
        leading: leads out near the end of a budget; None where budgets are not kept.
    """

    __slots__ = ("_inside", "_is_lazy", "_leading", "_masks", "_size", "_stops", "_walk")

    def __init__(self, walk: Walk, inside: Inside, masks: Masks, leading: LeadingOut | None) -> None:
        self._walk, self._inside, self._masks, self._leading = walk, inside, masks, leading
        self._is_lazy = not walk.trace.eager
        self._stops, self._size = inside.stop_ids, inside.vocabulary.size

    def taken(self, tokens: Sequence[int]) -> int | None:
        """How many of these tokens would be accepted, up to the first that is not; None where the window is not plain."""
        start = at = self._walk.at
        if at.phase is not _INSIDE:
            return None
        count = 0
        try:
            for token in tokens:
                if self._is_odd(at, token):
                    return None
                after = self._inside.take(at, token)
                if after is None:
                    break
                at, count = after, count + 1
        except LazyGrammarError:
            return None
        finally:
            _go_back(start)
        return count

    def fill(self, rows: Sequence[Row], drafts: Sequence[int], remaining: int | None) -> bool:
        """Write the rows before and behind each draft.

        Args:
            rows: one more than there are drafts.
            drafts: ids, without padding.
            remaining: tokens that may still be sampled before the first draft; None: no budget.

        Returns:
            Whether they were; false where the window is not plain or a draft is refused, and what the rows hold then is not to be used.

        Raises:
            LazyGrammarError: a row can not be made; the caller finds out behind which draft.
        """
        start = at = self._walk.at
        if at.phase is not _INSIDE:
            return False
        begin, last = time.perf_counter(), len(drafts)
        try:
            for i, row in enumerate(rows):
                self._fill(at, row, None if remaining is None else remaining - i)
                if i == last:
                    break
                after = None if self._is_odd(at, drafts[i]) else self._inside.take(at, drafts[i])
                if after is None:
                    return False
                at = after
            if self._is_lazy and at.matcher.is_completed():
                return False
        finally:
            _go_back(start)
        self._walk.trace.fill_seconds += time.perf_counter() - begin
        return True

    def _fill(self, at: Position, row: Row, remaining: int | None) -> None:
        masks = self._masks.held(at, row)
        if not masks:
            row.fill(ALL)
        if remaining is not None and remaining <= FIRST and self._leading is not None:
            self._leading.lead(at, row, remaining, masks=masks)

    def _is_odd(self, at: Position, token: int) -> bool:
        """Whether this token may do more here than step the matcher, or is no id at all."""
        if token in self._stops or not 0 <= token < self._size:
            return True
        return self._is_lazy and at.matcher.is_completed()


def _go_back(start: Position) -> None:
    steps = start.matcher.steps - start.steps
    if steps:
        start.matcher.rollback(steps)
