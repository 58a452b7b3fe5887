"""How many ways a grammar has to read one text: counted, not timed, so that the verdict is the same on every machine and under any load.

A parser that keeps all readings of a text at once (Earley's, which xgrammar's is) does work with every byte for each way in which a rule may have
begun and ended there. The same parse is walked here over the grammar's network, and the ways are counted.

Invariants:
- The count depends on the network and the walk alone.
- The work done is at most `bound` ways a byte, over `_BYTES` bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_lazy_grammar.core.network import Network

_BYTES = 32


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

    Attributes:
        most: the most ways that one byte needed, or more than `bound`.
    """

    def __init__(self, network: Network, bound: int) -> None:
        self._network, self._bound = network, bound
        self._waiting: list[dict[int, list[_Item]]] = []
        self.most = 0
        self._items = self._closed({_Item(network.start, network.start, 0)})

    def _closed(self, moved: set[_Item]) -> list[_Item]:
        """The items that wait for a byte, among these and all that they lead to without one."""
        at, ways = len(self._waiting), 0
        self._waiting.append(defaultdict(list))
        empty: set[int] = set()
        found, todo = [], list(moved)
        while todo and ways <= self._bound:
            item = todo.pop()
            if self._network.states[item.state].spans:
                found.append(item)
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

    def bytes_next(self) -> list[int]:
        """The first and the last byte of every span that may come next."""
        spans = [span for item in self._items for span in self._network.states[item.state].spans]
        return [byte for low, high, _ in spans for byte in (low, high)]

    def step(self, byte: int) -> None:
        """One byte more, which must be one that may come next."""
        spans = [(item, span) for item in self._items for span in self._network.states[item.state].spans]
        self._items = self._closed({item._replace(state=to) for item, (low, high, to) in spans if low <= byte <= high})


def most_ways(network: Network, bound: int) -> int:
    """The most ways that one byte needs on two walks of `_BYTES` bytes, by the least byte and by the greatest; more than `bound`: at least so many."""
    return max(_walked(network, bound, leaning) for leaning in (min, max))


def _walked(network: Network, bound: int, leaning: Callable[[list[int]], int]) -> int:
    readings = Readings(network, bound)
    for _ in range(_BYTES):
        nexts = readings.bytes_next()
        if not nexts or readings.most > bound:
            break
        readings.step(leaning(nexts))
    return readings.most
