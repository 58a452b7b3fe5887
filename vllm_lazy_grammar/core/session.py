"""One request's grammar, as an engine uses it: accept, fill, validate, roll back.

How the position moves stands in `walk`, what a row holds in `masks`; here they meet.

Invariants:
- Whatever moves the position drops the cached row first; a row is a function of the position alone.
- `rollback` counts offered tokens. After it the session is the one that never saw them, gate included.
- A refused token, and an id outside the vocabulary, change nothing.
- Only `fill`, `completion`, `stop_legal` and what reads a row join a compile; `accept` never does, but for a token that goes into a part of a
  dispatched grammar (`dispatch`) whose row nobody has asked for.
- A session is used by one thread at a time; what it shares with others is immutable or has its own lock.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.core.leading import FIRST, LeadingOut
from vllm_lazy_grammar.core.masks import Masks
from vllm_lazy_grammar.core.near_end import NearEnd
from vllm_lazy_grammar.core.rows import ALL, RowSlot, apply_row, is_allowed, only_allowed
from vllm_lazy_grammar.core.tentative import Tentative
from vllm_lazy_grammar.core.walk import Walk
from vllm_lazy_grammar.core.way_out import way_out
from vllm_lazy_grammar.core.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.awaiting import AwaitingRows, Pressed
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.completion import Outcome
    from vllm_lazy_grammar.core.drafts import Drafts
    from vllm_lazy_grammar.core.gate import Gate
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.journal import State
    from vllm_lazy_grammar.core.leading import EndingsStore
    from vllm_lazy_grammar.core.matcher import Row, Rows
    from vllm_lazy_grammar.core.trace import Trace
    from vllm_lazy_grammar.core.triggers import Forcible, TriggerSpec
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_now = time.perf_counter
_PENDING, _INSIDE = Phase.PENDING, Phase.INSIDE  # an enum's members are slow to look up


class Session:
    """The grammar of one request.

    Args:
        inside: what the grammar takes and allows.
        compile_: the grammar on its way.
        spec: the options of a lazy request; None for an eager one.
        gate: watches for triggers; None for an eager request.
        awaiting: makes the rows while awaiting; None for an eager request.
        endings: how grammars end, for requests with a budget; None where budgets are not kept.
        drafts: what the grammar knows of the text to come; None where it is not asked.
    """

    def __init__(  # noqa: PLR0913, PLR0917 -- the parts of a request meet here once
        self,
        inside: Inside,
        compile_: Compile,
        spec: TriggerSpec | None = None,
        gate: Gate | None = None,
        awaiting: AwaitingRows | None = None,
        endings: EndingsStore | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self._inside, self._compile = inside, compile_
        self._size, self._row_words = inside.vocabulary.size, inside.vocabulary.row_words
        self._stops = inside.stop_ids
        self._walk = Walk(inside, compile_, spec, gate)
        self._is_eager = gate is None
        if awaiting is not None:
            awaiting.trace = self._walk.trace
        self._masks = Masks(inside, awaiting)
        self._slot = RowSlot()
        self.drafts = drafts
        leading = None if endings is None else LeadingOut(endings, inside, compile_, self._walk.trace)
        self._near_end = NearEnd(self._walk, self._masks, compile_, leading)
        self._window = Window(self._walk, inside, self._masks, leading)
        self._tentative = Tentative(self._walk, self._masks, compile_, inside)

    @property
    def size(self) -> int:
        """Ids of the vocabulary."""
        return self._size

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's."""
        return self._inside.vocabulary

    @property
    def forcible(self) -> tuple[Forcible, ...]:
        """The ways into the triggers of a lazy request."""
        return self._walk.gate.triggers.forcible

    @property
    def trace(self) -> Trace:
        """What the gate did and what the rows cost."""
        return self._walk.trace

    # -- moving ------------------------------------------------------------------------------------------------------

    def accept(self, token: int) -> bool:
        """Advance by one offered token; true where it was accepted. A refused token, and an id outside the vocabulary, change nothing.

        Raises:
            PatternTimeoutError: a trigger pattern ran too long; nothing changed.
            ReplayRefusedError: a trigger fired, the grammar refuses what follows, and `on_reject` is ``error``; nothing changed.
            GrammarError: the trigger fired and the grammar can not be compiled; nothing changed.
        """
        if self._slot.is_kept:
            self._slot.drop()
        return 0 <= token < self._size and self._walk.accept(token)

    def rollback(self, n: int) -> None:
        """Take back the last `n` offered tokens; `n == 0` only drops the row.

        Raises:
            ValueError: `n` is negative or more than were offered; nothing changed.
        """
        if not 0 <= n <= len(self._walk):
            raise ValueError(f"rollback of {n} tokens, but {len(self._walk)} were offered")
        self._slot.drop()
        self._walk.undo(n)

    def reset(self) -> None:
        """Back to the start, gate included."""
        self.rollback(len(self._walk))

    def behind_reasoning(self) -> None:
        """The first token offered is the one that ends the reasoning: the gate sees it, and `force_after` does not count it."""
        self._masks.behind_reasoning()

    def validate(self, tokens: Sequence[int]) -> list[int]:
        """The longest prefix of `tokens` that would be accepted; offers none of them for good.

        Where a trigger fired and the compile has come meanwhile, the kept tokens are settled first, as the next `accept` or `fill` would settle
        them; the phase and the gate may change by that. Whatever is offered here is taken back, so the number of offered tokens stays.

        Nothing behind a token that ends the turn. Nothing, too, that fires while the grammar still compiles, since the row behind it would
        wait for the compile; a stop id that is masked is refused.
        """
        self._slot.drop()
        if self._compile.ready:
            self._walk.settle()
        taken = self._window.taken(tokens)
        return self._tentative.kept(tokens) if taken is None else list(tokens[:taken])

    def opens(self, token: int) -> bool:
        """Whether this token alone would fire while the grammar still compiles; moves nothing and joins no compile. See `Tentative.opens`."""
        self._slot.drop()
        return self._tentative.opens(token)

    def draft(self, limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Tokens that are likely to come next, as the grammar knows; moves nothing and joins no compile.

        Args:
            limit: how many, at most.
            ahead: drafts that come before them; nothing is added behind one that the grammar refuses.
        """
        if self.drafts is None or limit <= 0 or not self.drafts.worth:
            return []
        self._slot.drop()
        return self._tentative.drafted(self.drafts, limit, ahead)

    # -- rows --------------------------------------------------------------------------------------------------------

    def fill(self, row: Row, remaining: int | None = None, *, keep: bool = True) -> bool:
        """Write the mask of the next position; a second call at the same position copies.

        Args:
            row: ``ceil(vocab_size / 32)`` int32 words, all written.
            remaining: tokens that may still be sampled, this one included; near the end the row leads out. None: no budget.
            keep: keep a copy for a second call; false where none will come, for then that call makes the row anew.

        Returns:
            Whether anything is masked; on false the row is -1 throughout.
        """
        if remaining is not None and remaining <= FIRST and self._near_end.leading is not None:
            return self._fill_near_end(row, remaining, keep=keep)
        kept = self._slot.copy_to(row) if self._slot.is_kept else None
        if kept is not None:
            return kept
        walk = self._walk
        if walk.at.phase is _PENDING:
            self._join()
        begin = _now()
        is_held = self._is_eager and walk.at.phase is _INSIDE  # almost every row of an eager request
        masks = self._masks.held(walk.at, row) if is_held else self._masks.fill(walk, row)
        if not masks:
            row.fill(ALL)
        if keep:
            self._slot.keep(row, masks=masks)
        walk.trace.fill_seconds += _now() - begin
        walk.trace.rows += 1
        return masks

    def fill_window(self, rows: Rows, drafts: Sequence[int], remaining: int | None = None) -> bool:
        """Write the rows before and behind each of some drafts, moving nothing; false where that has to be asked for token by token. See `Window.fill`."""
        return self._window.fill(rows, drafts, remaining)

    def _fill_near_end(self, row: Row, remaining: int, *, keep: bool) -> bool:
        walk = self._walk
        if remaining == 1 and self._stops and walk.has_called:
            walk.trace.led_out = True
            walk.trace.rows += 1
            return self._masks.ending(row)
        pressed = self._near_end.pressed(remaining)
        masks = self.fill(row, keep=keep) if pressed is None else self._fill_pressed(row, pressed)
        return self._near_end.lead(row, remaining, masks=masks)

    def _fill_pressed(self, row: Row, pressed: Pressed) -> bool:
        trace, begin = self._walk.trace, _now()
        masks = self._masks.fill(self._walk, row, pressed)
        if not masks:
            row.fill(ALL)
        trace.fill_seconds += _now() - begin
        trace.rows += 1
        return masks

    def look_ahead(self) -> None:
        """Have it worked out how the grammar ends, for a budget that will soon ask; the compile is done."""
        self._near_end.begin()

    def owes(self, remaining: int) -> int | None:
        """Tokens that the shortest way to the end takes while the model still reasons. See `NearEnd.owes`."""
        return self._near_end.owes(remaining)

    def _join(self) -> None:
        """Wait for the compile where a fired trigger needs it, and settle."""
        if self._walk.at.phase is not _PENDING:
            return
        begin = time.perf_counter()
        waits = not self._compile.ready
        try:
            self._walk.settle()
        finally:
            if waits:
                self.trace.joined_seconds += time.perf_counter() - begin

    def _row(self) -> Row:
        row = np.empty(self._row_words, np.int32)
        self.fill(row)
        return row

    def is_allowed(self, token: int) -> bool:
        """Whether the position's row allows this id; false for ids beyond it."""
        return is_allowed(self._row(), token, self._size)

    def forced_token(self) -> int | None:
        """The single legal id, where there is exactly one and a grammar holds; reads the position's row."""
        if self._walk.at.phase is not Phase.INSIDE:
            return None
        was_there = self._slot.is_kept
        row = self._row()
        begin = time.perf_counter()
        token = only_allowed(row, self._size)
        if not was_there:
            self.trace.forced_seconds += time.perf_counter() - begin
        return token

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Write ``-inf`` where the row masks, over the first ``min(len(logits), vocab_size)`` entries; all else stays as it is."""
        apply_row(logits, self._row(), self._size)

    def mask_stops(self, row: Row) -> None:
        """Clear the stop ids in a row that is somebody else's otherwise."""
        self._masks.mask_stops(row)

    def go_on(self, row: Row) -> None:
        """Clear the stop ids in this position's row where anything else is legal: the answer shall not end yet."""
        self._masks.go_on(row)

    # -- where it stands ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """What it is doing; does not join."""
        return self._walk.at.phase

    @property
    def state(self) -> State:
        """Where it stands, as a person is told it; does not join."""
        return self._walk.state

    @property
    def must_call(self) -> bool:
        """Whether the turn may not end because no trigger has fired yet and one must; does not join."""
        return self._walk.must_call

    @property
    def buffer(self) -> bytes:
        """The text observed since the gate opened its eyes; empty for an eager request and once fired."""
        return b"" if self.trace.eager else self._walk.gate.buffer

    @property
    def num_offered(self) -> int:
        """Tokens offered and not taken back."""
        return len(self._walk)

    @property
    def num_history_steps(self) -> int:
        """Matcher steps so far, those of earlier activations included."""
        return self._walk.at.history + self._walk.at.steps

    def is_terminated(self) -> bool:
        """Whether a stop id was accepted where the turn may end."""
        return self._walk.at.phase is Phase.TERMINATED

    def stop_legal(self) -> bool:
        """Whether the turn may end here; joins a compile that a fired trigger waits for."""
        self._join()
        return not self._stops or self._walk.may_end

    def blocks_stop(self) -> bool:
        """Whether the grammar keeps the turn from ending here."""
        return not self.is_terminated() and not self.stop_legal()

    def completion(self, max_bytes: int) -> Outcome:
        """The shortest legal way to where the turn may end: fewest tokens, then fewest bytes; moves nothing.

        Empty where it already may end. While awaiting with a call still owed: a trigger and the shortest call behind it.

        Args:
            max_bytes: the way may have so many bytes.
        """
        return way_out(self, max_bytes)

    def fork(self) -> Session:
        """An independent session at the same position, with the same history."""
        twin = copy.copy(self)
        twin._walk = self._walk.fork()  # noqa: SLF001 -- our own twin
        twin._slot = RowSlot()  # noqa: SLF001 -- our own twin
        twin._near_end = self._near_end.fork(twin._walk)  # noqa: SLF001 -- our own twin
        twin._window = Window(twin._walk, self._inside, self._masks, twin._near_end.leading)  # noqa: SLF001 -- our own twin
        twin._tentative = Tentative(twin._walk, self._masks, self._compile, self._inside)  # noqa: SLF001 -- our own twin
        return twin
