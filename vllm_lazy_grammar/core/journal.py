"""What each offered token cost, so that any number of offered tokens can be taken back exactly.

Invariants:
- One entry per offered (accepted) token, whatever it cost the matcher or the gate; undo counts tokens, never matcher steps.
- A position is immutable: taking tokens back is putting an older position in its place, so nothing of the newer one survives.
- A position that did not change is stored by reference: a hundred thousand free tokens cost eight bytes and a code each.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.blanks import BlankState
    from vllm_lazy_grammar.core.matcher import Matcher


class Phase(enum.Enum):
    """What a session is doing; "may end" and "finished" are `INSIDE` with a complete matcher."""

    AWAITING = "awaiting"
    PENDING = "pending"
    INSIDE = "inside"
    TERMINATED = "terminated"


State = Literal["awaiting", "pending", "inside", "may end", "finished", "ended"]
"""Where a session stands, as a person is told it; "ended" is behind a stop id that ended the turn."""


class GateMoves(enum.IntFlag):
    """What one offered token did to the gate, in this order."""

    NONE = 0
    REARMED_BEFORE = 1
    OBSERVED = 2
    REARMED_AFTER = 4


Text = tuple["Text | None", int | bytes]
"""What a matcher was fed, one link for each of its steps: all before it, then a whole token by its id, or bytes."""


class Position(NamedTuple):
    """Everything that moves in a session, but the gate.

    Attributes:
        phase: see `Phase`.
        matcher: the matcher of this activation; `NO_MATCHER` while awaiting or pending.
        steps: how many steps of that matcher belong to this position.
        blanks: where the text stands between JSON elements.
        history: matcher steps of earlier activations.
        activations: how often the grammar was completed and then left, or completed in this activation.
        counted: whether this activation is in `activations` already.
        pending: the tokens since the trigger fired, the firing one included, while the grammar compiles.
        trail: the bytes fed to the matcher while rows for them may be prewarmed; None beyond.
        events: how many of the trace's events belong to this position.
        text: what the matcher was fed, newest first; None at its start.
    """

    phase: Phase
    matcher: Matcher
    steps: int
    blanks: BlankState
    history: int = 0
    activations: int = 0
    counted: bool = False
    pending: tuple[int, ...] = ()
    trail: bytes | None = None
    events: int = 0
    text: Text | None = None


class Journal:
    """Positions before each offered token, and what the token did to the gate."""

    __slots__ = ("_moves", "_positions")

    def __init__(self) -> None:
        self._positions: list[Position] = []
        self._moves = bytearray()

    def __len__(self) -> int:
        return len(self._positions)

    def record(self, before: Position, moves: GateMoves | int) -> None:
        """One offered token: where the session stood before it, and what it did to the gate."""
        self._positions.append(before)
        self._moves.append(moves)

    def undo(self) -> tuple[Position, GateMoves]:
        """Take back the last entry: the position before it, and the gate's moves to take back, last first."""
        return self._positions.pop(), GateMoves(self._moves.pop())

    def undo_plain(self, n: int, matcher: Matcher) -> Position | None:
        """Take back the last `n` entries at once, `n` at least 1: the position before them.

        None, and nothing changed, where they moved the gate, or began with another matcher than this.
        """
        before = self._positions[-n]
        if before.matcher is not matcher or any(self._moves[-n:]):
            return None
        del self._positions[-n:], self._moves[-n:]
        return before

    def fork(self, forked: dict[int, Matcher]) -> Journal:
        """A copy whose matchers are those of `forked` (by the id of the original)."""
        twin = Journal()
        twin._positions = [p._replace(matcher=forked[id(p.matcher)]) for p in self._positions]
        twin._moves = bytearray(self._moves)
        return twin

    def matchers(self) -> list[Matcher]:
        """The distinct matchers that the entries refer to."""
        return list({id(p.matcher): p.matcher for p in self._positions}.values())
