"""What the gate has read since it opened its eyes: tokens, their bytes, and facts that can be wound back.

Invariants:
- Positions are bytes from the start of the context; token spans are contiguous and begin at its end.
- After `pop`, everything that `push` added and every fact that was noted since is as it was before.
- One token costs its bytes and a constant; facts cost memory only when they change.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from copy import copy
from itertools import pairwise
from typing import NamedTuple, Self

Fact = tuple[int, int]


class Fed(NamedTuple):
    """One thing for the matcher to take.

    Args:
        token: the id.
        data: the bytes of it that count.
        whole: all its bytes count, so it is fed by its id; otherwise by `data`.
    """

    token: int
    data: bytes
    whole: bool


class Ledger:
    """A mapping of small integers that remembers how to go back."""

    __slots__ = ("facts", "log")

    def __init__(self) -> None:
        self.facts: dict[Fact, int] = {}
        self.log: list[tuple[int, Fact, int | None]] = []

    def get(self, fact: Fact) -> int | None:
        """The value; None where there is none."""
        return self.facts.get(fact)

    def note(self, step: int, fact: Fact, value: int | None) -> None:
        """Set a value (None: forget it) at `step`; steps never decrease."""
        old = self.facts.get(fact)
        if old == value:
            return
        self.log.append((step, fact, old))
        self._put(fact, value)

    def _put(self, fact: Fact, value: int | None) -> None:
        if value is None:
            self.facts.pop(fact, None)
        else:
            self.facts[fact] = value

    def rewind(self, step: int) -> None:
        """Undo what was noted at `step` and later."""
        while self.log and self.log[-1][0] >= step:
            _, fact, old = self.log.pop()
            self._put(fact, old)

    def copy(self) -> Self:
        """An independent copy."""
        other = type(self)()
        other.facts, other.log = self.facts.copy(), self.log.copy()
        return other


class Transcript:
    """Context and observed tokens.

    Args:
        context: bytes before the first token; seen by patterns, never replayed.
        state: the literal automaton's state behind the context.
    """

    __slots__ = ("context", "data", "ends", "facts", "states", "tokens")

    def __init__(self, context: bytes, state: int) -> None:
        self.context = len(context)
        self.data = bytearray(context)
        self.facts = Ledger()
        self.tokens = array("i")
        self.ends = array("q", [len(context)])
        self.states = array("i", [state])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def begin(self) -> int:
        """Where the last token begins; with none, 0: the context is then what was read last."""
        return self.ends[-2] if self.tokens else 0

    @property
    def end(self) -> int:
        """Where the last token ends."""
        return self.ends[-1]

    @property
    def token(self) -> int:
        """The last token."""
        return self.tokens[-1]

    @property
    def state(self) -> int:
        """The literal automaton's state behind the last token."""
        return self.states[-1]

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each token, from the end of the context."""
        return tuple(pairwise(end - self.context for end in self.ends))

    def push(self, token: int, piece: bytes) -> None:
        """One more token; the state is the one before it until it is set."""
        self.data += piece
        self.tokens.append(token)
        self.ends.append(len(self.data))
        self.states.append(self.states[-1])

    def pop(self) -> None:
        """Without the last token, and without what was noted since it was pushed."""
        self.facts.rewind(len(self))
        self.tokens.pop()
        self.ends.pop()
        self.states.pop()
        del self.data[self.ends[-1] :]

    def note(self, fact: Fact, value: int | None) -> None:
        """Note a fact about the text up to the last token."""
        self.facts.note(len(self), fact, value)

    def fed(self, at: int) -> tuple[Fed, ...]:
        """The tokens whose span reaches past byte `at`, the first one cut there; those without bytes are left out."""
        first = max(bisect_right(self.ends, at), 1)
        return tuple(filter(None, (self._cut(index, at) for index in range(first, len(self.ends)))))

    def _cut(self, index: int, at: int) -> Fed | None:
        begin, end = self.ends[index - 1], self.ends[index]
        data = bytes(self.data[max(begin, at) : end])
        return Fed(self.tokens[index - 1], data, whole=begin >= at) if data else None

    def copy(self) -> Self:
        """An independent copy."""
        other = copy(self)
        other.data = self.data[:]
        other.facts = self.facts.copy()
        other.tokens, other.ends, other.states = self.tokens[:], self.ends[:], self.states[:]
        return other
