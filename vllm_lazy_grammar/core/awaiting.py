"""The rows of a session that awaits its trigger: nothing masked, refused tails, stop ids that a call is owed before, or only the way into a trigger.

Invariants:
- No compile is joined: until the grammar is there nothing counts as refused, and no tail behind a word is forced.
- A row that masks anything masks padding; where nothing is masked that is said, and the row is not touched.
- The gate is where it was after every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from vllm_lazy_grammar.core.refusals import Refusals
from vllm_lazy_grammar.core.rows import IdSet, open_row
from vllm_lazy_grammar.core.ways import LONGEST_HALF, WaysIn

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.gate import Gate
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.rows import RowCache
    from vllm_lazy_grammar.core.triggers import Triggers
    from vllm_lazy_grammar.core.vocabulary import Vocabulary


Pressed = Literal["", "hurry", "late"]
"""What a budget that runs out asks of an awaiting session."""


class AwaitingRows:
    """The rows of one request while it awaits.

    Args:
        vocabulary: the model's.
        trie: its pieces; shared.
        rows: shared cache.
        triggers: what the gate waits for, and the options.
        inside: how the grammar takes a replay, and the stop ids.
        compile_: the grammar, compiled or on its way.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a row depends on
        self,
        vocabulary: Vocabulary,
        trie: ByteTrie,
        rows: RowCache,
        triggers: Triggers,
        inside: Inside,
        compile_: Compile,
    ) -> None:
        size = vocabulary.size
        self._spec, self._compile = triggers.spec, compile_
        self._open = open_row(vocabulary)
        self._stops = IdSet(inside.stop_ids, size)
        self._tokens = IdSet(triggers.token_ids, size)
        self._nothing = IdSet((), size)
        self._refusals = Refusals(vocabulary, trie, triggers, inside, compile_.key, rows)
        self._ways: WaysIn | None = None
        if self._spec.mandatory and triggers.forcible:
            self._ways = WaysIn(trie, [way.data for way in triggers.forcible if way.token is None])

        self._tokens_in = min((_spelled(way.data, vocabulary) for way in triggers.forcible), default=None)

    @property
    def behind_trigger(self) -> int:
        """Whether the grammar begins behind the token that fires, so that this one is no part of its text: 1, or 0."""
        return int(self._spec.start == "after")

    @property
    def tokens_in(self) -> int | None:
        """Tokens, or a few more, that the shortest trigger takes from any text; None where no trigger can be forced."""
        return None if self._tokens_in is None else self._tokens_in + LONGEST_HALF

    def is_forced(self, gate: Gate) -> bool:
        """Whether as much was written as may come before a call that is owed."""
        after = self._spec.force_after
        return after is not None and gate.observed >= after

    def fill(self, gate: Gate, row: Row, *, must_call: bool, pressed: Pressed = "") -> bool:
        """Write the mask of the next token; the gate awaits.

        Args:
            gate: where the text stands; left as it was.
            row: written where something is masked.
            must_call: the turn may not end before a trigger fired: stop ids are masked, and from `force_after` tokens on whatever does not
                lead into a trigger.
            pressed: what is left of the budget is what a call needs: ``hurry``, as if `force_after` were reached; or less: ``late``, nothing
                may fire any more.

        Returns:
            Whether anything is masked; on false the row is as it was.
        """
        forced = must_call and (pressed == "hurry" or self.is_forced(gate)) and self._ways is not None
        there = (forced or self._spec.on_reject == "forbid") and self._has_grammar()
        refused = self._refusals.find(gate) if there else self._nothing
        if pressed == "late":
            refused = self._refusals.firing(gate)
        if forced and self._force(gate, row, refused, tails=there):
            return True
        if not len(refused) and not (must_call and len(self._stops)):
            return False
        np.copyto(row, self._open)
        refused.mask(row)
        if must_call:
            self._stops.mask(row)
        else:
            self._stops.allow(row)
        return True

    def _has_grammar(self) -> bool:
        future = self._compile.future
        return future.done() and not future.cancelled() and future.exception() is None

    def _force(self, gate: Gate, row: Row, refused: IdSet, *, tails: bool) -> bool:
        """Write the way into a trigger; false where no token leads there."""
        assert self._ways is not None  # noqa: S101 -- made where a trigger may be forced
        for _ in self._ways.rows(gate, row, tails=tails):
            refused.mask(row)
            self._stops.mask(row)
            if row.any():
                break
        self._tokens.allow(row)
        refused.mask(row)
        return bool(row.any())


def _spelled(text: bytes, vocabulary: Vocabulary) -> int:
    """Tokens of a text, the longest first; a byte that no token begins with counts as one."""
    count = place = 0
    while place < len(text):
        ends = range(len(text), place, -1)
        place = next((end for end in ends if vocabulary.id_of(text[place:end]) is not None), place + 1)
        count += 1
    return count
