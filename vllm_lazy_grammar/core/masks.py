"""Which row a position has: free, held by the grammar, or leaving it.

Invariants:
- Stop ids are set where the turn may end, and only there: here, in `awaiting` while no trigger has fired, in `leading` near the end.
- A row that masks anything masks padding; a row that masks nothing is reported so and its content is the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.rows import IdSet, open_row
from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_lazy_grammar.core.awaiting import AwaitingRows, Pressed
    from vllm_lazy_grammar.core.blanks import BlankState
    from vllm_lazy_grammar.core.gate import Gate
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.journal import Position
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.walk import Walk


class Masks:
    """Makes the rows of one request.

    Args:
        inside: what the grammar allows.
        awaiting: what is masked while no trigger has fired; None for an eager request.
    """

    __slots__ = ("_awaiting", "_inside", "_stops", "_text_stops")

    def __init__(self, inside: Inside, awaiting: AwaitingRows | None) -> None:
        self._inside, self._awaiting = inside, awaiting
        self._stops = IdSet(inside.stop_ids, inside.vocabulary.size)
        self._text_stops = sorted(inside.stop_ids - inside.vocabulary.special_ids)

    def fill(self, walk: Walk, row: Row, pressed: Pressed | None = None) -> bool:
        """The row of where a walk stands; what it holds is to be overwritten where nothing is masked (false)."""
        at = walk.at
        if at.phase is Phase.INSIDE:
            return self.leaving(walk.gate, at, row, pressed) if walk.may_leave else self.held(at, row)
        if at.phase is Phase.AWAITING:
            return self.free(walk.gate, row, must_call=walk.must_call, pressed=pressed)
        return False

    def held(self, at: Position, row: Row) -> bool:
        """Inside the grammar: its tokens, and the stop ids where it may end. Returns whether anything is masked.

        RequestError where the request's own stop ids leave no token.
        """
        masks = self._inside.fill(at, row)
        self._end(row, complete=at.matcher.is_completed())
        return masks

    def held_ahead(self, blanks: Sequence[BlankState], rows: Sequence[Row], complete: Sequence[bool]) -> None:
        """As `held`, from rows that a matcher filled ahead of where it stands; `Inside.blanks_ahead` knows the blanks. Each row masks something."""
        correct = self._inside.correct
        for row, before, is_complete in zip(rows, blanks, complete, strict=True):
            correct(before, row)
            if is_complete or self._text_stops:
                self._end(row, complete=is_complete)

    def _end(self, row: Row, *, complete: bool) -> None:
        if complete:
            self._stops.allow(row)
        elif self._text_stops and not row.any():
            raise RequestError(
                "stop_token_ids", self._text_stops, "spell what the grammar needs here: no token is left"
            )

    def pressed(self, remaining: int, shortest: int, *, must_call: bool) -> Pressed | None:
        """What a budget that runs out asks for while a trigger may fire; None while there is time."""
        assert self._awaiting is not None  # noqa: S101 -- only a lazy session has triggers
        return self._awaiting.pressed(remaining, shortest, must_call=must_call)

    @property
    def way_in(self) -> int:
        """Tokens that a trigger takes from any text, or a few more."""
        return 0 if self._awaiting is None else self._awaiting.way_in

    def ending(self, row: Row) -> bool:
        """The row of the last token, where the turn may end and should: the stop ids alone. True: it masks something."""
        row.fill(0)
        self._stops.allow(row)
        return True

    def behind_reasoning(self) -> None:
        """The first token observed ends the reasoning: `force_after` does not count it."""
        if self._awaiting is not None:
            self._awaiting.behind_reasoning()

    def is_forced(self, gate: Gate) -> bool:
        """Whether a call that is owed must begin now."""
        return self._awaiting is not None and self._awaiting.is_forced(gate)

    def free(self, gate: Gate, row: Row, *, must_call: bool, pressed: Pressed | None = None) -> bool:
        """While awaiting: everything, but refused tails, and but the stop ids where a call is owed; or only the way into a trigger."""
        assert self._awaiting is not None  # noqa: S101 -- only a lazy session is ever awaiting
        return self._awaiting.fill(gate, row, must_call=must_call, pressed=pressed)

    def leaving(self, gate: Gate, at: Position, row: Row, pressed: Pressed | None = None) -> bool:
        """Complete, and to be armed again by whatever the grammar does not take: its tokens, and those that are free after it."""
        gate.rearm()
        try:
            masks = self.free(gate, row, must_call=False, pressed=pressed)
        finally:
            gate.undo_rearm()
        if masks:
            taken = np.empty_like(row)
            self._inside.fill(at, taken)
            np.bitwise_or(row, taken, out=row)
        return masks

    def mask_stops(self, row: Row) -> None:
        """Clear the stop ids, and padding with them: the row masks something now."""
        self._stops.mask(row)
        np.bitwise_and(row, open_row(self._inside.vocabulary), out=row)

    def go_on(self, row: Row) -> None:
        """Clear the stop ids where anything else is left."""
        kept = row.copy()
        self.mask_stops(row)
        if not row.any():
            np.copyto(row, kept)
