"""How many ways a grammar has to read one text: counted, not timed, so that the verdict is the same on every machine and under any load.

A parser that keeps all readings of a text at once (Earley's, which xgrammar's is) does work with every byte for each way in which a rule may have
begun and ended there. The same parse is walked here over the grammar's network, and the ways are counted.

A walk follows one text only, so several are taken: by the least byte, by the greatest, and by the one that keeps most readings alive. The last
one is taken from the start of rules too that no such walk has come to: a walk chooses one alternative and never sees the rest.

Invariants:
- The count depends on the network and the walk alone, and never exceeds what a text of the grammar needs.
- The work done is at most `bound` ways a byte, over `_BYTES` bytes of each of `2 + _RULES` walks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_lazy_grammar.core.network import Network, Span

_BYTES = 32
_FEW = 8
_RULES = 32
"""Rules that are walked from, the nearest to the grammar's start first."""


class _Item(NamedTuple):
    """A place in one reading: the state, the rule that it belongs to (by its first state), and the byte at which that rule began."""

    state: int
    rule: int
    begin: int


class Readings:
    """All readings of a text that grows byte by byte.

    Args:
        network: the grammar.
        bound: ways that are counted for one byte, at most; what is beyond is not followed.
        start: the first state of the rule that is read; None: of the grammar.

    Attributes:
        most: the most ways that one byte needed, or more than `bound`.
        read: the rules that a byte of the first half of a walk was a part of, by their first states.
    """

    def __init__(self, network: Network, bound: int, start: int | None = None) -> None:
        self._network, self._bound = network, bound
        self._waiting: list[dict[int, list[_Item]]] = []
        self.most = 0
        self.read: set[int] = set()
        first = network.start if start is None else start
        self._spans = self._closed({_Item(first, first, 0)})

    def _closed(self, moved: set[_Item]) -> list[tuple[_Item, Span]]:
        """The items that wait for a byte, among these and all that they lead to without one, and the bytes that they wait for."""
        at, ways = len(self._waiting), 0
        self._waiting.append(defaultdict(list))
        empty: set[int] = set()
        todo = list(moved)
        found: list[tuple[_Item, Span]] = []
        while todo and ways <= self._bound:
            item = todo.pop()
            found += [(item, span) for span in self._network.states[item.state].spans]
            following = self._silent(item, at, empty)
            ways += len(following)
            new = set(following) - moved
            moved |= new
            todo.extend(sorted(new))
        self.most = max(self.most, ways)
        return found

    def _silent(self, item: _Item, at: int, empty: set[int]) -> list[_Item]:
        """Where an item leads without a byte. `empty`: rules that were found to begin and end at this place; grows."""
        state = self._network.states[item.state]
        following = [item._replace(state=target) for target in state.jumps]
        for start, target in self._network.calls(item.state):
            behind = item._replace(state=target)
            self._waiting[at][start].append(behind)
            following.append(_Item(start, start, at))
            if start in empty:
                following.append(behind)
        if state.final:
            if item.begin == at:
                empty.add(item.rule)
            following += self._waiting[item.begin][item.rule]
        return following

    @property
    def may_go_on(self) -> bool:
        """Whether a byte may come next."""
        return bool(self._spans)

    def bytes_next(self) -> list[int]:
        """The first and the last byte of every span that may come next."""
        return [byte for _, (low, high, _) in self._spans for byte in (low, high)]

    def busiest(self) -> int:
        """The byte that the most readings take, the least of them; one must be able to come next.

        Where few readings take it, of some such bytes the one whose step has the most ways: a choice at the start decides what is read at all.
        """
        change = Counter[int]()
        for _, (low, high, _) in self._spans:
            change[low] += 1
            change[high + 1] -= 1
        places = sorted(change)
        alive = dict(zip(places, accumulate(change[place] for place in places), strict=True))
        most = max(alive.values())
        bytes_ = [byte for byte, count in alive.items() if count == most]
        return bytes_[0] if most > _FEW else max(bytes_[:_FEW], key=self._ways)

    def _moved(self, byte: int) -> set[_Item]:
        return {item._replace(state=target) for item, (low, high, target) in self._spans if low <= byte <= high}

    def _ways(self, byte: int) -> int:
        """What `most` would be if it was about this step alone. Moves nothing."""
        most, self.most = self.most, 0
        self._closed(self._moved(byte))
        self._waiting.pop()
        ways, self.most = self.most, most
        return ways

    def step(self, byte: int) -> None:
        """One byte more, which must be one that may come next."""
        moved = self._moved(byte)
        if len(self._waiting) <= _BYTES // 2:
            self.read |= {item.rule for item in moved}
        self._spans = self._closed(moved)


def most_ways(network: Network, bound: int) -> int:
    """The most ways that one byte needs on some walks of `_BYTES` bytes; more than `bound`: at least so many."""
    most = max(_walked(Readings(network, bound), bound, choose) for choose in (_least, _greatest))
    read: set[int] = set()
    for start in islice(_calling(network), _RULES):
        if most > bound:
            break
        if start not in read:
            readings = Readings(network, bound, start)
            most = max(most, _walked(readings, bound, Readings.busiest))
            read |= readings.read
    return most


def _least(readings: Readings) -> int:
    return min(readings.bytes_next())


def _greatest(readings: Readings) -> int:
    return max(readings.bytes_next())


def _walked(readings: Readings, bound: int, choose: Callable[[Readings], int]) -> int:
    for _ in range(_BYTES):
        if readings.most > bound or not readings.may_go_on:
            break
        readings.step(choose(readings))
    return readings.most


def _calling(network: Network) -> Iterator[int]:
    """The first states of rules that call others, the grammar's own first: where no rule is called a text has few readings."""
    rules = [network.start]
    seen = set(rules)
    for start in rules:
        called = _called(network, start)
        if called:
            yield start
        fresh = [rule for rule in called if rule not in seen]
        seen.update(fresh)
        rules += fresh


def _called(network: Network, start: int) -> list[int]:
    """The first states of the rules that a rule calls, each once."""
    inside = [start]
    seen, called = {start}, dict[int, None]()
    for number in inside:
        state = network.states[number]
        calls = [state.repeat] if state.repeat else state.calls
        called |= dict.fromkeys(call.start for call in calls)
        parts = (*state.spans, *state.named, *calls)
        fresh = {*(part.target for part in parts), *state.jumps} - seen
        seen |= fresh
        inside += sorted(fresh)
    return list(called)
