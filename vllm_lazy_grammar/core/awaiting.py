"""The rows of a session that awaits its trigger: nothing masked, refused tails, stop ids that a call is owed before, or only the way into a trigger.

Invariants:
- No compile is joined: until the grammar is there nothing counts as refused, and no tail behind a word is forced.
- A row that masks anything masks padding; where nothing is masked that is said, and the row is not touched.
- The gate is where it was after every call.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.refusals import Refusals
from vllm_lazy_grammar.core.rows import IdSet, open_row
from vllm_lazy_grammar.core.trace import Trace
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


_STRADDLES = 1
"""Tokens that may be needed besides where a trigger's last token is not one of those that the shortest text begins with."""


class Pressed(NamedTuple):
    """What a budget that runs out asks of an awaiting session.

    Args:
        way: a call is owed: as if `force_after` were reached, and the trigger may take so many tokens; None: nothing may fire any more.
    """

    way: int | None


LATE = Pressed(None)
"""What is left is less than a call needs, and none is owed."""


class AwaitingRows:
    """The rows of one request while it awaits.

    Args:
        vocabulary: the model's.
        trie: its pieces; shared.
        rows: shared cache.
        triggers: what the gate waits for, and the options.
        inside: how the grammar takes a replay, and the stop ids.
        compile_: the grammar, compiled or on its way.

    Attributes:
        trace: told of rows that were not just free; the request's, once there is one.
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
        self.trace = Trace(eager=False)
        self._spec, self._compile = triggers.spec, compile_
        self._open = open_row(vocabulary)
        self._stops = IdSet(inside.stop_ids, size)
        self._tokens = IdSet(triggers.token_ids, size)
        self._nothing = IdSet((), size)
        self._refusals = Refusals(vocabulary, trie, triggers, inside, compile_.key, rows)
        self._uncounted = 0
        self._ways: WaysIn | None = None
        if self._spec.mandatory and triggers.forcible:
            self._ways = WaysIn(trie, [way.data for way in triggers.forcible if way.token is None])

    @cached_property
    def _trigger_tokens(self) -> int | None:
        """Fewest tokens of a trigger, from the start of one; None where none can be forced."""
        if self._ways is None:
            return None
        return 1 if self._tokens.ids else self._ways.needs_from_start

    @property
    def way_in(self) -> int:
        """Tokens that a trigger takes from any text, or a few more; 0 where none can be forced."""
        return 0 if self._trigger_tokens is None else self._trigger_tokens + LONGEST_HALF + 1

    def pressed(self, remaining: int, shortest: int, *, must_call: bool) -> Pressed | None:
        """What the budget asks for here.

        Args:
            remaining: tokens that may still be sampled.
            shortest: tokens of the grammar's shortest text, the stop id included.
            must_call: a call is owed.

        Returns:
            None while there is time.
        """
        is_after = self._spec.start == "after"
        if not must_call:
            return LATE if remaining - is_after < shortest else None
        trigger = self._trigger_tokens
        if trigger is None:
            return None
        if remaining > shortest + self.way_in:
            return None
        way = remaining - shortest
        if way < trigger and not is_after:  # the text may begin with the trigger, which then is counted twice
            way += trigger - _STRADDLES
        return Pressed(max(way, 0))

    def behind_reasoning(self) -> None:
        """The first token that the gate observes ends the reasoning: it is not counted."""
        self._uncounted = 1

    def is_forced(self, gate: Gate) -> bool:
        """Whether as much was written as may come before a call that is owed."""
        after = self._spec.force_after
        return after is not None and gate.observed - self._uncounted >= after

    def fill(self, gate: Gate, row: Row, *, must_call: bool, pressed: Pressed | None = None) -> bool:
        """Write the mask of the next token; the gate awaits.

        Args:
            gate: where the text stands; left as it was.
            row: written where something is masked.
            must_call: the turn may not end before a trigger fired: stop ids are masked, and from `force_after` tokens on whatever does not
                lead into a trigger.
            pressed: what is left of the budget is what a call needs, or less.

        Returns:
            Whether anything is masked; on false the row is as it was.
        """
        forced = must_call and self._ways is not None and (pressed is not None or self.is_forced(gate))
        there = (forced or self._spec.on_reject == "forbid") and self._has_grammar()
        refused = self._refusals.find(gate) if there else self._nothing
        if pressed is LATE:
            refused = self._refusals.firing(gate)
        if forced and self._force(gate, row, refused, pressed, tails=there):
            self.trace.forced_rows += 1
            return True
        if len(refused):
            self._note_refused(pressed)
        elif not (must_call and len(self._stops)):
            return False
        np.copyto(row, self._open)
        refused.mask(row)
        if must_call:
            self._stops.mask(row)
        else:
            self._stops.allow(row)
        return True

    def _note_refused(self, pressed: Pressed | None) -> None:
        if pressed is LATE:
            self.trace.led_out = True
        else:
            self.trace.tail_rows += 1

    def _write_way(  # noqa: PLR0913 -- what a forced row depends on
        self, ways: WaysIn, gate: Gate, row: Row, refused: IdSet, pressed: Pressed | None, *, tails: bool
    ) -> bool:
        for _ in ways.rows(gate, row, tails=tails, within=pressed and pressed.way):
            refused.mask(row)
            self._stops.mask(row)
            if row.any():
                return True
        return False

    def _has_grammar(self) -> bool:
        future = self._compile.future
        return future.done() and not future.cancelled() and future.exception() is None

    def _force(self, gate: Gate, row: Row, refused: IdSet, pressed: Pressed | None, *, tails: bool) -> bool:
        """Write the way into a trigger; false where no token leads there."""
        assert self._ways is not None  # noqa: S101 -- made where a trigger may be forced
        # A token that holds the trigger's end and more may lead into a text that is longer than there is time for.
        for longer in (False, True) if tails and pressed else (tails,):
            if self._write_way(self._ways, gate, row, refused, pressed, tails=longer):
                break
        self._tokens.allow(row)
        refused.mask(row)
        return bool(row.any())
