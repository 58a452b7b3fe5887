"""What a budget that runs out asks of a request: to begin the call that is owed in time, to begin none that would not fit, to end what is open.

Invariants:
- Nothing here joins a compile: what is not known yet asks for nothing.
- Far from the end (`FIRST`) nothing is asked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.leading import FIRST

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.awaiting import Pressed
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.leading import LeadingOut
    from vllm_lazy_grammar.core.masks import Masks
    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.walk import Walk


class NearEnd:
    """The last tokens of one request.

    Args:
        walk: its position.
        masks: its rows.
        compile_: its grammar on its way.
        leading: how that grammar ends; None where budgets are not kept.
    """

    __slots__ = ("_compile", "_masks", "_walk", "leading")

    def __init__(self, walk: Walk, masks: Masks, compile_: Compile, leading: LeadingOut | None) -> None:
        self._walk, self._masks, self._compile = walk, masks, compile_
        self.leading = leading

    def begin(self) -> None:
        """Have it worked out how the grammar ends; the compile is done."""
        if self.leading is not None:
            self.leading.begin()

    def pressed(self, remaining: int) -> Pressed | None:
        """What the budget asks for while a trigger may fire: to begin the call that is owed, or to begin none that would not fit."""
        walk, leading = self._walk, self.leading
        if leading is None or not (walk.at.phase is Phase.AWAITING or walk.may_leave) or not self._compile.ready:
            return None
        shortest = leading.shortest(remaining)
        return None if shortest is None else self._masks.pressed(remaining, shortest, must_call=walk.must_call)

    def lead(self, row: Row, remaining: int, *, masks: bool) -> bool:
        """Leave in the row of this position what still ends in time; whether the row masks anything then."""
        walk, leading = self._walk, self.leading
        if leading is None or walk.at.phase is not Phase.INSIDE:
            return masks
        trace, begin = walk.trace, time.perf_counter()
        waited = trace.endings_seconds
        masks = leading.lead(walk.at, row, remaining, masks=masks)
        trace.fill_seconds += time.perf_counter() - begin - (trace.endings_seconds - waited)
        return masks

    def owes(self, remaining: int) -> int | None:
        """Tokens that the shortest way to the end takes while the model still reasons, the stop id included: a few more at most.

        None where the turn may end without more, where that is not known (yet), and far from the end.
        """
        walk, leading = self._walk, self.leading
        if leading is None or remaining > FIRST or not self._compile.ready:
            return None
        must_call = walk.must_call
        if not (walk.trace.eager or must_call):
            return None
        shortest = leading.shortest(remaining)
        return None if shortest is None else shortest + (self._masks.way_in if must_call else 0)

    def fork(self, walk: Walk) -> NearEnd:
        """The same for an independent walk at the same position."""
        return NearEnd(walk, self._masks, self._compile, None if self.leading is None else self.leading.fork())
