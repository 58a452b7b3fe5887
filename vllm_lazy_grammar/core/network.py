"""A grammar as a network of byte ranges and calls: what is needed to know how it can end.

A rule is some states; a call enters another rule and comes back to a state behind it. A counted repetition is a state of its own, which is
unrolled only as far as a text goes.

Invariants:
- States are numbered from 0; ids beyond those of the network are repetitions that have counted so far, made when they are first asked for.
- `shortest[s]` is the least number of bytes from state `s` to its rule's end; `FAR` where there is no way.
- A repetition with a wide or no upper bound stops counting at its lower bound: the engine's own row knows the upper one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAR = 1 << 30
"""No way."""

_COUNTED = 64
"""Upper bounds of repetitions up to which each one is told apart."""


class Span(NamedTuple):
    """The bytes `low` to `high` lead to `target`."""

    low: int
    high: int
    target: int


class Call(NamedTuple):
    """A rule that begins at `start`, then `target`."""

    start: int
    target: int


class Repeat(NamedTuple):
    """A rule that begins at `start`, `lower` to `upper` times (None: no bound), then `target`."""

    start: int
    target: int
    lower: int
    upper: int | None


class Named(NamedTuple):
    """Tokens taken by their id, then `target`."""

    tokens: frozenset[int]
    target: int


@dataclass(slots=True)
class State:
    """What leads on from a state.

    Args:
        spans: by bytes.
        calls: by another rule.
        jumps: by nothing.
        named: by tokens.
        repeat: by a counted repetition; then there is nothing else.
        final: the rule may end here.
        counted: for a repetition that is being counted: how often it has happened.
    """

    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    jumps: list[int] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    repeat: Repeat | None = None
    final: bool = False
    counted: int | None = None

    @property
    def is_tail(self) -> bool:
        """Whether the rule ends here and nothing else can happen."""
        return self.final and not (self.spans or self.calls or self.jumps or self.named or self.repeat)


class Network:
    """The states of a grammar.

    Args:
        states: in the order of their numbers.
        start: where the grammar begins.

    Attributes:
        states: those given, and repetitions that have counted so far.
        shortest: bytes to the end of the rule, by state.
    """

    def __init__(self, states: Sequence[State], start: int) -> None:
        self.states = list(states)
        self.start = start
        self.shortest = _shortest(self.states)
        self._counting: dict[tuple[Repeat, int], int] = {}
        for state in list(self.states):
            if state.repeat is not None:
                state.jumps = [self._count(state.repeat, 0)]

    def _count(self, repeat: Repeat, counted: int) -> int:
        """The state behind `counted` repetitions; its next one is found when it is asked for."""
        known = self._counting.get((repeat, counted))
        if known is None:
            known = self._counting[repeat, counted] = len(self.states)
            jumps = [repeat.target] if counted >= repeat.lower else []
            self.states.append(State(jumps=jumps, repeat=repeat, counted=counted))
            left = max(repeat.lower - counted, 0) * self.shortest[repeat.start]
            self.shortest.append(min(FAR, left + self.shortest[repeat.target]))
        return known

    def calls(self, number: int) -> Sequence[Call]:
        """The rules that a state may enter; of a repetition, one more of it."""
        state = self.states[number]
        repeat, counted = state.repeat, state.counted
        if repeat is None or counted is None or state.calls:
            return state.calls
        if repeat.upper is not None and counted >= repeat.upper:
            return ()
        narrow = repeat.upper is not None and repeat.upper <= _COUNTED
        following = counted + 1 if narrow or counted < repeat.lower else counted
        state.calls = [Call(repeat.start, self._count(repeat, following))]
        return state.calls


def composed(  # noqa: PLR0913 -- two networks, and where they meet
    openings: Sequence[State],
    ends: Sequence[int],
    parts: Sequence[Network | None],
    *,
    mark: int,
    behind: int,
    start: int,
) -> Network:
    """One network of openings and of what stands behind each.

    Args:
        openings: the first states; nothing leads on from where an opening ends.
        ends: for each of them, which part stands behind it; -1 where none does.
        parts: the parts; None where a part leads nowhere.
        mark: where a part takes just this byte, the openings go on at `behind`, then the part behind the byte.
        behind: a state of the openings.
        start: where a text begins.
    """
    states, end = [*openings, State(final=True)], len(openings)
    starts: dict[int, int] = {}
    for place, part in enumerate(parts):
        if part is not None:
            offset = len(states)
            starts[place] = part.start + offset
            states += [_moved(state, offset, mark, behind) for state in part.states if state.counted is None]
    for number, place in enumerate(ends):
        if place in starts:
            states[number].calls = [Call(starts[place], end)]
    return Network(states, start)


def _moved(state: State, by: int, mark: int, behind: int) -> State:
    """A state whose numbers are moved, with calls of `behind` in place of the mark."""
    marks = [span for span in state.spans if span.low == span.high == mark]
    calls = [Call(start + by, target + by) for start, target in state.calls]
    repeat = state.repeat
    return State(
        spans=[Span(low, high, target + by) for low, high, target in state.spans if not low == high == mark],
        calls=[*calls, *(Call(behind, span.target + by) for span in marks)],
        jumps=[] if repeat else [target + by for target in state.jumps],
        named=[Named(tokens, target + by) for tokens, target in state.named],
        repeat=repeat and repeat._replace(start=repeat.start + by, target=repeat.target + by),
        final=state.final,
    )


def _steps(states: Sequence[State], shortest: Sequence[int], number: int) -> Iterator[int]:
    """The lengths of all ways from one state to its rule's end, as far as they are known."""
    state = states[number]
    if state.final:
        yield 0
    yield from (1 + shortest[span.target] for span in state.spans)
    yield from (shortest[target] for target in state.jumps)
    yield from (shortest[call.start] + shortest[call.target] for call in state.calls)
    yield from (1 + shortest[named.target] for named in state.named)
    if state.repeat is not None:
        yield state.repeat.lower * shortest[state.repeat.start] + shortest[state.repeat.target]


def _needs(state: State) -> Iterator[int]:
    """The states that a state's length follows from."""
    yield from (span.target for span in state.spans)
    yield from state.jumps
    yield from (named.target for named in state.named)
    for call in (*state.calls, *((state.repeat,) if state.repeat else ())):
        yield call.start
        yield call.target


def _shortest(states: Sequence[State]) -> list[int]:
    """Bytes to the end of the rule, by state: lowered until nothing changes."""
    needed_by: dict[int, set[int]] = defaultdict(set)
    for number, state in enumerate(states):
        for other in _needs(state):
            needed_by[other].add(number)
    shortest = [FAR] * len(states)
    waiting = deque(number for number, state in enumerate(states) if state.final)
    queued = set(waiting)
    while waiting:
        number = waiting.popleft()
        queued.discard(number)
        least = min(FAR, *_steps(states, shortest, number), FAR)
        if least < shortest[number]:
            shortest[number] = least
            fresh = needed_by[number] - queued
            waiting.extend(sorted(fresh))
            queued |= fresh
    return shortest
