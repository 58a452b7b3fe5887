"""How one request's position moves: the transitions between awaiting, pending, inside and terminated, and their undoing.

    awaiting --trigger fires--> pending --grammar compiled, replay fed--> inside --stop id where it may end--> terminated
        ^                                                                   |
        +-------- re-arm, undo, a replay that the grammar refuses ----------+

"May end" and "finished" are `inside` with a complete matcher. An eager request begins pending, with nothing to replay.

Invariants:
- A refused token, and a move that raises, leave position, gate and journal as they were.
- `undo` counts offered tokens; the position after it is the one before them, gate included.
- Nothing here waits for a compile but `settle`. Whether a firing token is answered at once or settled later makes no difference to the
  position that results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm_lazy_grammar.core.blanks import START
from vllm_lazy_grammar.core.gate import Fired
from vllm_lazy_grammar.core.journal import GateMoves, Journal, Phase, Position
from vllm_lazy_grammar.core.matcher import NO_MATCHER
from vllm_lazy_grammar.core.trace import Event, Trace
from vllm_lazy_grammar.errors import InternalError, LazyGrammarError, ReplayRefusedError

if TYPE_CHECKING:
    from typing import Self

    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.gate import Gate, Observation
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.journal import State
    from vllm_lazy_grammar.core.triggers import TriggerSpec

_PASSED, _OBSERVED = GateMoves.NONE, GateMoves.OBSERVED
_INSIDE = Phase.INSIDE
_STATES: dict[Phase, State] = {Phase.AWAITING: "awaiting", Phase.PENDING: "pending", Phase.TERMINATED: "ended"}


class Walk:
    """One request's position, and the journal of how it got there.

    Args:
        inside: what the grammar takes.
        compile_: the grammar on its way.
        spec: the options of a lazy request; None for an eager one.
        gate: watches for triggers; None for an eager request.

    Attributes:
        at: the position; replaced, never changed.
        trace: what the gate did.
    """

    __slots__ = ("_compile", "_gate", "_inside", "_journal", "_refitted", "_spec", "_stops", "at", "trace")

    def __init__(self, inside: Inside, compile_: Compile, spec: TriggerSpec | None, gate: Gate | None) -> None:
        self._inside, self._compile, self._spec, self._gate = inside, compile_, spec, gate
        self._stops = inside.stop_ids
        phase = Phase.PENDING if gate is None else Phase.AWAITING
        self.at = Position(phase, NO_MATCHER, steps=0, blanks=START)
        self.trace = Trace(eager=gate is None)
        self._journal = Journal()
        self._refitted: tuple[int, tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self._journal)

    @property
    def gate(self) -> Gate:
        """The gate of a lazy request."""
        if self._gate is None:
            raise InternalError("an eager request has no gate")
        return self._gate

    # -- one token ---------------------------------------------------------------------------------------------------

    def accept(self, token: int) -> bool:
        """Move by one token of the vocabulary; false where it is refused. Raises what ends the request, nothing moved."""
        before = self.at
        if before.phase is _INSIDE and self._spec is None and token not in self._stops:
            after = self._inside.take(before, token)  # what almost every token of an eager request is
            if after is None:
                return False
            self.at = after
            self._journal.record(before, 0)
            return True
        return self._accept(token)

    def _accept(self, token: int) -> bool:
        if self.at.phase is Phase.PENDING and self._compile.ready:
            self.settle()
        before = self.at
        try:
            moves = self._advance(token)
        except LazyGrammarError:
            self.at = before
            self._untell()
            raise
        if moves is None:
            return False
        self._journal.record(before, moves)
        return True

    def _advance(self, token: int, skip: int = 0) -> GateMoves | None:
        """What the gate did, or None where the token is refused. The first `skip` firings on it are known to be refused."""
        at = self.at
        if at.phase is Phase.INSIDE:
            return self._stop(at, token) if token in self._stops else self._step(at, token)
        if at.phase is Phase.TERMINATED:
            return _PASSED
        if at.phase is Phase.PENDING:
            self.at = at._replace(pending=(*at.pending, token))
            return _PASSED
        if token in self._stops and not self.must_call:
            self.at = at._replace(phase=Phase.TERMINATED)
            return _PASSED
        return self._observe(token, skip)

    def _step(self, at: Position, token: int) -> GateMoves | None:
        after = self._inside.take(at, token)
        if after is None:
            return self._leave(at, token)
        self.at = after
        return _PASSED if self._spec is None else self._counted(_PASSED)

    def _stop(self, at: Position, token: int) -> GateMoves:
        """A stop id ends the turn where it may end, also as the grammar's own end marker; elsewhere it is accepted and moves nothing."""
        marked = self._inside.ends_with(at, token)
        if marked is not None or at.matcher.is_completed():
            self.at = (marked or at)._replace(phase=Phase.TERMINATED)
        return _PASSED

    def _leave(self, at: Position, token: int) -> GateMoves | None:
        """A token that the grammar refuses: where it is complete and may be armed again, the token is free text and the gate's."""
        if not self.may_leave:
            return None
        self._rearm(at)
        try:
            return self._observe(token, 0) | GateMoves.REARMED_BEFORE
        except LazyGrammarError:
            self.gate.undo_rearm()
            raise

    def _counted(self, moves: GateMoves) -> GateMoves:
        """Inside a lazy request's grammar: count a completion, and arm again at once where nothing more can come."""
        at = self.at
        if not at.matcher.is_completed():
            return moves
        if not at.counted:
            at = self.at = at._replace(activations=at.activations + 1, counted=True)
        if self.may_leave and self._inside.is_finished(at):
            self._rearm(at)
            return moves | GateMoves.REARMED_AFTER
        return moves

    def _rearm(self, at: Position) -> None:
        self.gate.rearm()
        self.at = Position(
            Phase.AWAITING,
            NO_MATCHER,
            steps=0,
            blanks=START,
            history=at.history + at.steps,
            activations=at.activations,
            events=at.events,
        )
        self._tell("rearmed", None)

    # -- the gate ----------------------------------------------------------------------------------------------------

    def _observe(self, token: int, skip: int) -> GateMoves:
        outcome = self.gate.observe(token)
        try:
            while isinstance(outcome, Fired):
                if skip <= 0 and self._enter(outcome, token):
                    return _OBSERVED if self.at.phase is Phase.PENDING else self._counted(_OBSERVED)
                skip -= 1
                outcome = self._refuse(outcome)
        except LazyGrammarError:
            self.gate.undo()
            raise
        return _OBSERVED

    def _enter(self, fired: Fired, token: int) -> bool:
        """Feed the replay, or keep it pending while the grammar compiles; false where the grammar refuses it."""
        if self._compile.ready:
            entered = self._fed(fired)
            if entered is None:
                return False
            self.at = entered
        else:
            self.at = self.at._replace(phase=Phase.PENDING, pending=(token,))
        self._tell("fired", fired)
        return True

    def _fed(self, fired: Fired) -> Position | None:
        at: Position | None = self._inside.start(self.at)
        for fed in fired.replay:
            at = None if at is None else self._inside.take_fed(at, fed)
        return at

    def _refuse(self, fired: Fired) -> Observation:
        if self._spec is not None and self._spec.on_reject == "error":
            raise ReplayRefusedError(b"".join(fed.data for fed in fired.replay))
        self._tell("refused", fired)
        return self.gate.refuse()

    def _tell(self, kind: Literal["fired", "refused", "rearmed"], fired: Fired | None) -> None:
        events = self.trace.events
        trigger, replay = (None, ()) if fired is None else (fired.trigger, fired.replay)
        events.append(Event(kind, len(self._journal), trigger, replay))
        self.at = self.at._replace(events=len(events))

    def _untell(self) -> None:
        """The trace tells nothing that was taken back."""
        del self.trace.events[self.at.events :]

    # -- settling ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Leave `pending`: wait for the compile, then offer the firing token and those kept since once more, now that each can be answered.

        Raises what the compile raised, and `ReplayRefusedError`; the request can not go on then.
        """
        if self.at.phase is not Phase.PENDING:
            return
        self._compile.join()
        tokens = self.at.pending
        if not tokens:
            self.at = self._inside.start(self.at)
            return
        self._take_back(len(tokens))
        self._offer_again(tokens)

    def _offer_again(self, tokens: tuple[int, ...]) -> None:
        start, skips = len(self._journal), [0] * len(tokens)
        while (i := len(self._journal) - start) < len(tokens):
            before = self.at
            moves = self._advance(tokens[i], skips[i])
            if moves is None:
                self._skip_last_firing(start, skips)
            else:
                self._journal.record(before, moves)
        if any(skips):
            self._refitted = start, tokens

    def _skip_last_firing(self, start: int, skips: list[int]) -> None:
        """A kept token does not fit behind its replay: go back to the token that fired, and have that firing refused next time.

        With the trigger ``word:{``, a grammar that takes only ``{"a"`` and the kept tokens ``x{`` ``y{`` ``"a"``: the first ``{`` fires
        (``skips == [0, 0, 0]``) and ``y{`` does not fit behind it. So the walk goes back to before ``x{``, whose first firing is to be refused
        (``[1, 0, 0]``): ``x{`` is prose, ``y{`` fires, ``"a"`` fits. What was noted for tokens behind the one that fired belonged to another
        past of theirs and begins at 0 again.
        """
        inside = True
        while inside:
            self._take_back(1)
            inside = self.at.phase is Phase.INSIDE
        i = len(self._journal) - start
        skips[i:] = [skips[i] + 1] + [0] * (len(skips) - i - 1)

    # -- taking back -------------------------------------------------------------------------------------------------

    def undo(self, n: int) -> None:
        """Take back the last `n` offered tokens; at most as many as there are."""
        self._take_back(n)
        if self._refitted is not None:
            self._refit(*self._refitted)

    def _refit(self, start: int, tokens: tuple[int, ...]) -> None:
        """Kept tokens had a firing refused for them: where some of those are gone, the others are answered without them."""
        left = len(self._journal) - start
        if left < len(tokens):
            self._refitted = None
            self._take_back(max(0, left))
            self._offer_again(tokens[: max(0, left)])

    def _take_back(self, n: int) -> None:
        plain = self._journal.undo_plain(n, self.at.matcher) if n else self.at
        if plain is not None:
            if plain.matcher.steps > plain.steps:
                plain.matcher.rollback(plain.matcher.steps - plain.steps)
            self.at = plain
            self._untell()
            return
        for _ in range(n):
            before, moves = self._journal.undo()
            if moves:
                self._undo_gate(moves)
            if before.matcher.steps > before.steps:
                before.matcher.rollback(before.matcher.steps - before.steps)
            self.at = before
        self._untell()

    def _undo_gate(self, moves: GateMoves) -> None:
        if moves & GateMoves.REARMED_AFTER:
            self.gate.undo_rearm()
        if moves & GateMoves.OBSERVED:
            self.gate.undo()
        if moves & GateMoves.REARMED_BEFORE:
            self.gate.undo_rearm()

    # -- where it stands ---------------------------------------------------------------------------------------------

    @property
    def must_call(self) -> bool:
        """Whether the turn may not end before a trigger fired, and none has yet."""
        at = self.at
        return at.phase is Phase.AWAITING and self._spec is not None and self._spec.mandatory and not at.activations

    @property
    def has_called(self) -> bool:
        """Whether a call was owed, is there, and the turn may end."""
        spec = self._spec
        return spec is not None and spec.mandatory and bool(self.at.activations) and self.may_end

    @property
    def may_leave(self) -> bool:
        """Whether the grammar is complete and whatever it does not take is free text again."""
        at, spec = self.at, self._spec
        if spec is None or not spec.rearm or at.phase is not Phase.INSIDE or not at.matcher.is_completed():
            return False
        return spec.max_activations is None or at.activations < spec.max_activations

    @property
    def may_end(self) -> bool:
        """Whether the turn may end here; while pending it may not."""
        at = self.at
        if at.phase is Phase.INSIDE:
            return at.matcher.is_completed()
        return at.phase is Phase.TERMINATED or (at.phase is Phase.AWAITING and not self.must_call)

    @property
    def state(self) -> State:
        """Where it stands; "finished" is told from "may end" by a row."""
        at = self.at
        if at.phase is not _INSIDE:
            return _STATES[at.phase]
        if not at.matcher.is_completed():
            return "inside"
        return "finished" if self._inside.is_finished(at) else "may end"

    def ends(self, token: int) -> bool:
        """Whether this stop id would end the turn here."""
        if self.may_end:
            return True
        marked = self._inside.ends_with(self.at, token) if self.at.phase is Phase.INSIDE else None
        if marked is None:
            return False
        marked.matcher.rollback(1)
        return True

    def fork(self) -> Self:
        """An independent walk at the same position, with the same history."""
        twin = type(self)(self._inside, self._compile, self._spec, self._gate and self._gate.fork())
        forked = {id(m): m.fork() for m in (self.at.matcher, *self._journal.matchers())}
        twin.at = self.at._replace(matcher=forked[id(self.at.matcher)])
        twin._journal = self._journal.fork(forked)  # noqa: SLF001 -- our own twin
        twin._refitted = self._refitted  # noqa: SLF001 -- our own twin
        twin.trace.events[:] = self.trace.events
        return twin
