"""The fewest tokens from a place in a grammar to the end of its rule, by what of a token is left open there.

A place is a state of the network and a node of the vocabulary's trie: the bytes of a token that has begun and not ended. A token may begin in
one rule and end in another, so a rule does not have one length: it has one for each node at which it can be left.

Invariants:
- Every way counted is a text of the grammar, spelled by tokens of the trie that are not excluded.
- Where nothing is thinned out the numbers are exact. Where a vocabulary writes every byte, what cannot matter much is left out: of many bytes
  that lead to the same state all but `_KEPT`, and steps that are `_DETOUR` bytes longer than the shortest; then the numbers are those of the
  shortest text among the rest.
- What is left out depends on the state alone, so the token that begins a shortest way leads to a place that is one token nearer.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from vllm_lazy_grammar.core.network import FAR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vllm_lazy_grammar.core.network import Call, Network, State
    from vllm_lazy_grammar.core.pieces import Pieces

_KEPT = 2
_DETOUR = 8
_SLACK = 2
_BLANKS = b" \n\r\t"

Place = tuple[int, int]
"""(state, node of the trie)"""

Exits = dict[int, int]
"""Node at which the rule is left -> fewest tokens completed until there."""

EFFORT = 50_000
"""Places that may be worked out for one grammar."""


class TooMuchError(Exception):
    """Finding out would take too long; the grammar is served without a budget."""


class _Ways(NamedTuple):
    """How a place goes on: to another with so many tokens more; or through a rule, entered at a node."""

    steps: list[tuple[Place, int]]
    calls: Sequence[Call]
    final: bool


class _Work:
    """One computation: what a place can do is told to those that wait for it, the smallest numbers first.

    Args:
        exits: what is known; complete when the work is done.
        ways: how a place goes on.
        slack: exits dearer than the cheapest whole one by so many tokens are not told.
    """

    def __init__(self, exits: dict[Place, Exits], ways: Callable[[Place], _Ways], slack: int) -> None:
        self._exits, self._ways, self._slack = exits, ways, slack
        self._begun: list[Place] = []
        self._new: list[Place] = []
        self._behind: dict[Place, dict[Place, int]] = {}
        self._callers: dict[Place, list[tuple[Place, int]]] = {}
        self._heap: list[tuple[int, Place, int]] = []

    def run(self, place: Place) -> None:
        """Work out this place and all that it depends on."""
        exits, heap = self._exits, self._heap
        self._ask(place)
        while heap or self._new:
            while self._new:
                self._begin(self._new.pop())
            if not heap:
                break
            tokens, here, node = heappop(heap)
            if exits[here][node] == tokens:
                self._tell(here, node, tokens)

    def _tell(self, here: Place, node: int, tokens: int) -> None:
        for place, more in self._behind[here].items():
            self._offer(place, node, tokens + more)
        for place, target in self._callers[here]:
            self._follow(place, (target, node), tokens)

    def _ask(self, place: Place) -> Exits:
        known = self._exits.get(place)
        if known is None:
            known = self._exits[place] = {}
            self._behind[place], self._callers[place] = {}, []
            self._begun.append(place)
            self._new.append(place)
            if len(self._exits) > EFFORT:
                raise TooMuchError
        return known

    def _begin(self, place: Place) -> None:
        ways = self._ways(place)
        if ways.final:
            self._offer(place, place[1], 0)
        for ahead, tokens in ways.steps:
            self._follow(place, ahead, tokens)
        for call in ways.calls:
            inner = (call.start, place[1])
            known = self._ask(inner)
            if inner in self._callers:
                self._callers[inner].append((place, call.target))
            for node, tokens in list(known.items()):
                self._follow(place, (call.target, node), tokens)

    def _follow(self, place: Place, ahead: Place, tokens: int) -> None:
        """`place` can do what `ahead` can, for so many tokens more."""
        known = self._ask(ahead)
        if ahead in self._behind:
            waiting = self._behind[ahead]
            if waiting.get(place, FAR) <= tokens:
                return
            waiting[place] = tokens
        for node, more in list(known.items()):
            self._offer(place, node, tokens + more)

    def _offer(self, place: Place, node: int, tokens: int) -> None:
        mine = self._exits[place]
        if tokens < mine.get(node, FAR) and tokens < mine.get(0, FAR) + self._slack:
            mine[node] = tokens
            heappush(self._heap, (tokens, place, node))

    def forget(self) -> None:
        """Drop what was begun and is not finished."""
        for place in self._begun:
            self._exits.pop(place, None)


class Shortest:
    """Fewest tokens, worked out as they are asked for and kept.

    Args:
        network: the grammar.
        pieces: the vocabulary's tokens, without those that are never text.
    """

    def __init__(self, network: Network, pieces: Pieces) -> None:
        self._network, self._pieces = network, pieces
        self._exits: dict[Place, Exits] = {}
        self._bytes: dict[int, list[tuple[int, int]]] = {}
        self._slack = _SLACK if pieces.complete else FAR

    def exits(self, state: int, node: int) -> Exits:
        """Where the rule can be left, coming from this place, and with how many tokens. TooMuchError past `EFFORT` places."""
        place = (state, node)
        known = self._exits.get(place)
        return self._solve(place) if known is None else known

    def _solve(self, place: Place) -> Exits:
        """Work out a place and all it depends on."""
        work = _Work(self._exits, self._ways, self._slack)
        try:
            work.run(place)
        except TooMuchError:
            work.forget()
            raise
        return self._exits[place]

    def _ways(self, here: Place) -> _Ways:
        number, node = here
        state = self._network.states[number]
        child = self._pieces.child
        steps: list[tuple[Place, int]] = [((target, node), 0) for target in self._jumps(number, state)]
        for byte, target in self._bytes_of(number):
            below = child(node, byte)
            if below:
                steps.append(((target, below), 0))
        if node and self._pieces.ends(node):
            steps.append(((number, 0), 1))
        if not node:
            steps.extend(((named.target, 0), 1) for named in state.named)
        return _Ways(steps, self._calls(number, state), state.final)

    def _near(self, number: int, through: int) -> bool:
        """Whether going on through so many bytes is hardly longer than need be: what is one byte long can not have fewer tokens."""
        shortest = self._network.shortest[number]
        return not self._pieces.complete or through <= shortest + min(_DETOUR, 2 * shortest)

    def _jumps(self, number: int, state: State) -> Iterable[int]:
        shortest = self._network.shortest
        return [target for target in state.jumps if self._near(number, shortest[target])]

    def _calls(self, number: int, state: State) -> Sequence[Call]:
        """The calls worth following. A repetition that has happened often enough is left: its upper bound need not be known then."""
        if state.counted is not None and state.jumps:
            return ()
        shortest = self._network.shortest
        return [
            call
            for call in self._network.calls(number)
            if self._near(number, min(FAR, shortest[call.start] + shortest[call.target]))
        ]

    def _bytes_of(self, number: int) -> list[tuple[int, int]]:
        """(byte, target) of a state; thinned out where the vocabulary writes every byte."""
        known = self._bytes.get(number)
        if known is None:
            known = self._bytes[number] = list(self._read_bytes(number))
        return known

    def _read_bytes(self, number: int) -> Iterator[tuple[int, int]]:
        by_target: dict[int, set[int]] = defaultdict(set)
        for span in self._network.states[number].spans:
            by_target[span.target].update(range(span.low, span.high + 1))
        if by_target.get(number, set()) == set(_BLANKS):
            del by_target[
                number
            ]  # blanks between JSON elements: how many may follow each other is not the grammar's to say
        for target, found in by_target.items():
            if self._near(number, 1 + self._network.shortest[target]):
                kept = sorted(found, key=self._pieces.rank) if self._pieces.complete else sorted(found)
                yield from ((byte, target) for byte in (kept[:_KEPT] if self._pieces.complete else kept))
