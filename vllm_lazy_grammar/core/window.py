"""A draft window at a plain position: which drafts would be taken, and the rows of all of them at once, without moving the session.

Plain is: inside a grammar, and nothing but the matcher and what is counted beside it moves by a token. No stop id, no complete grammar of a lazy
request (which may be left, or counted), nothing that raises, nothing that would wait for a tool's own grammar. What is not plain is left to the
session, token by token.

Invariants:
- Position, gate, journal and kept row are not touched, and the matcher stands behind each call where it stood before it, whatever was raised.
- What is answered here is what the session answers token by token; a property test holds each against the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from vllm_lazy_grammar.core.dispatch_matcher import DispatchMatcher
from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.leading import FIRST
from vllm_lazy_grammar.core.matcher import taken
from vllm_lazy_grammar.core.rows import ALL
from vllm_lazy_grammar.errors import InternalError, LazyGrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.blanks import BlankState
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.journal import Position
    from vllm_lazy_grammar.core.leading import LeadingOut
    from vllm_lazy_grammar.core.masks import Masks
    from vllm_lazy_grammar.core.matcher import LooksAhead, Row, Rows
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

    __slots__ = ("_asked", "_inside", "_is_lazy", "_leading", "_masks", "_size", "_stops", "_walk")

    def __init__(self, walk: Walk, inside: Inside, masks: Masks, leading: LeadingOut | None) -> None:
        self._walk, self._inside, self._masks, self._leading = walk, inside, masks, leading
        self._is_lazy = not walk.trace.eager
        self._stops, self._size = inside.stop_ids, inside.vocabulary.size
        self._asked: tuple[BlankState | None, list[int], list[BlankState] | None] = (None, [], None)

    def taken(self, tokens: Sequence[int]) -> int | None:
        """How many of these tokens would be accepted, up to the first that is not; None where the window is not plain."""
        at = self._walk.at
        if at.phase is not _INSIDE or isinstance(at.matcher, DispatchMatcher) or not self._are_plain(tokens):
            return None
        try:
            if self._blanks(at, tokens) is None or self._is_lazy:
                return self._taken_by_turns(at, tokens)
            if hasattr(at.matcher, "taken"):
                return cast("LooksAhead", at.matcher).taken(tokens)
            return taken(at.matcher, tokens)
        except LazyGrammarError:
            return None

    def _taken_by_turns(self, start: Position, tokens: Sequence[int]) -> int | None:
        at, count = start, 0
        try:
            for token in tokens:
                if self._is_lazy and at.matcher.is_completed():
                    return None
                after = self._inside.take(at, token)
                if after is None:
                    break
                at, count = after, count + 1
        finally:
            _go_back(start)
        return count

    def fill(self, rows: Rows, drafts: Sequence[int], remaining: int | None) -> bool:
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
        at = self._walk.at
        if at.phase is not _INSIDE or not self._are_plain(drafts):
            return False
        trace, begin = self._walk.trace, time.perf_counter()
        waited = trace.endings_seconds
        blanks = self._blanks(at, drafts) if hasattr(at.matcher, "fill_ahead") else None
        if blanks is None:
            filled = self._fill_by_turns(at, rows, drafts, remaining)
        else:
            filled = self._fill_at_once(at, rows, drafts, blanks, remaining)
        trace.fill_seconds += time.perf_counter() - begin - (trace.endings_seconds - waited)
        trace.rows += len(rows) if filled else 0
        return filled

    def _fill_at_once(
        self, at: Position, rows: Rows, drafts: Sequence[int], blanks: list[BlankState], remaining: int | None
    ) -> bool:
        complete = cast("LooksAhead", at.matcher).fill_ahead(drafts, rows)
        if len(complete) < len(rows) or (self._is_lazy and any(complete)):
            return False
        filled = list(rows)
        self._masks.held_ahead(blanks, filled, complete)
        if remaining is not None and remaining - len(drafts) <= FIRST and self._leading is not None:
            self._lead(self._leading, at, filled, drafts, remaining)
        return True

    @staticmethod
    def _lead(leading: LeadingOut, at: Position, rows: Sequence[Row], drafts: Sequence[int], remaining: int) -> None:
        """Lead out where it is looked at; far from the end that is rare, so positions are made only where it is."""
        text = at.text
        for i, row in enumerate(rows):
            left = remaining - i
            if left <= FIRST:
                leading.lead(at._replace(steps=at.steps + i, text=text) if i else at, row, left, masks=True)
                if leading.rests(remaining - len(drafts)):
                    return
            if i < len(drafts):
                text = (text, drafts[i])

    def _fill_by_turns(self, start: Position, rows: Rows, drafts: Sequence[int], remaining: int | None) -> bool:
        at = start
        try:
            for i, row in enumerate(rows):
                self._fill(at, row, None if remaining is None else remaining - i)
                if self._is_lazy and at.matcher.is_completed():
                    return False
                if i == len(drafts):
                    return True
                after = self._inside.take(at, drafts[i])
                if after is None:
                    return False
                at = after
        finally:
            _go_back(start)
        raise InternalError("a window has one row more than it has drafts")

    def _fill(self, at: Position, row: Row, remaining: int | None) -> None:
        masks = self._masks.held(at, row)
        if not masks:
            row.fill(ALL)
        if remaining is not None and remaining <= FIRST and self._leading is not None:
            self._leading.lead(at, row, remaining, masks=masks)

    def _blanks(self, at: Position, tokens: Sequence[int]) -> list[BlankState] | None:
        """See `Inside.blanks_ahead`; what is validated is what is filled next, so the last answer is kept."""
        if at.blanks is not self._asked[0] or tokens != self._asked[1]:
            self._asked = at.blanks, list(tokens), self._inside.blanks_ahead(at, tokens)
        return self._asked[2]

    def _are_plain(self, tokens: Sequence[int]) -> bool:
        """Whether all are ids, and none a stop id."""
        return not tokens or (self._stops.isdisjoint(tokens) and min(tokens) >= 0 and max(tokens) < self._size)


def _go_back(start: Position) -> None:
    steps = start.matcher.steps - start.steps
    if steps:
        start.matcher.rollback(steps)
