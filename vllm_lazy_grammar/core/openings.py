"""The openings of several calls as one table of bytes, and which call each of them leads to.

Invariants:
- No opening begins another, so a text is in one place at a time: what would be in two is an `AmbiguousError`.
- A table is immutable; state 0 is the start.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.byte_trie import DEAD
from vllm_lazy_grammar.core.network import Span, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

_DIGITS = range(0x30, 0x3A)


class AmbiguousError(Exception):
    """A text would be at two places of the openings at once."""


class Digits(NamedTuple):
    """Between one and `most` decimal digits."""

    most: int


Opening = tuple[bytes | Digits, ...]
"""What opens a call, piece by piece."""


class _Trie:
    """All texts, byte by byte.

    Attributes:
        children: for each node what each byte leads to; node 0 is where a call's opening begins.
        ends: for each node the call whose opening ends there, -1 where none does.
        joins: nodes that are at the start of an opening too.
    """

    def __init__(self) -> None:
        self.children: list[dict[int, int]] = [{}]
        self.ends = [-1]
        self.joins: set[int] = set()
        self._shared: set[int] = set()  # by all digits

    def node(self) -> int:
        """A new node."""
        self.children.append({})
        self.ends.append(-1)
        return len(self.ends) - 1

    def insert(self, opening: Opening, call: int) -> None:
        """Add what opens a call."""
        fronts = [0]
        for atom in opening:
            fronts = self._digits(fronts, atom) if isinstance(atom, Digits) else [self.text(fronts, atom)]
        for front in fronts:
            if front == 0 or self.ends[front] >= 0 or self.children[front]:
                raise AmbiguousError
            self.ends[front] = call

    def text(self, fronts: list[int], text: bytes) -> int:
        """The node behind a text; made where it is not there."""
        for place, byte in enumerate(text):
            if len(fronts) == 1:
                return self._line(fronts[0], text[place:])
            fronts = [self._step(fronts, (byte,))]
        return fronts[0]

    def _line(self, node: int, text: bytes) -> int:
        """As `text`, from one node."""
        children, ends = self.children, self.ends
        for byte in text:
            behind = children[node].get(byte)
            if behind is None:
                if ends[node] >= 0:
                    raise AmbiguousError
                behind = children[node][byte] = len(ends)
                children.append({})
                ends.append(-1)
            elif behind in self._shared:
                raise AmbiguousError
            node = behind
        return node

    def _digits(self, fronts: list[int], digits: Digits) -> list[int]:
        found = []
        for _ in range(digits.most):
            fronts = [self._step(fronts, _DIGITS)]
            self._shared.update(fronts)
            found += fronts
        return found

    def _step(self, fronts: list[int], values: Sequence[int]) -> int:
        """The one node that any of some bytes leads to from any of some nodes."""
        known = {self.children[front].get(byte) for front in fronts for byte in values}
        if len(known) > 1 or any(self.ends[front] >= 0 for front in fronts):
            raise AmbiguousError
        node = known.pop()
        if node is not None and (node in self._shared) != (len(values) > 1):
            raise AmbiguousError
        if node is None:
            node = self.node()
            for front in fronts:
                self.children[front].update(dict.fromkeys(values, node))
        return node

    def lead(self, texts: Iterable[bytes]) -> int:
        """The node at which any of some texts begins, each of which leads to an opening's start."""
        first = self.node()
        self.joins.update([self.text([first], text) for text in texts])
        return first

    def line(self, text: bytes, target: int) -> list[int]:
        """The nodes before each byte of a text whose last byte leads to a node that is there."""
        nodes = [self.node() for _ in text]
        for node, byte, behind in zip(nodes, text, [*nodes[1:], target], strict=True):
            self.children[node][byte] = behind
        return nodes

    def moves(self, nodes: frozenset[int]) -> dict[int, frozenset[int]]:
        """What each byte leads to from any of some nodes."""
        if len(nodes) == 1:
            (node,) = nodes
            return {byte: self.closed({behind}) for byte, behind in self.children[node].items()}
        values = {byte for node in nodes for byte in self.children[node]}
        return {byte: self.closed({self.children[n][byte] for n in nodes if byte in self.children[n]}) for byte in values}

    def closed(self, nodes: set[int]) -> frozenset[int]:
        """Some nodes and those that they are at too."""
        return frozenset(nodes if self.joins.isdisjoint(nodes) else nodes | {0})

    def end(self, nodes: frozenset[int]) -> int:
        """The call whose opening ends at any of some nodes; -1 where none does."""
        found = max(self.ends[node] for node in nodes)
        if found >= 0 and len(nodes) > 1:
            raise AmbiguousError
        return found


class Openings:
    """The table.

    Args:
        opens: texts of which one comes first; at least one, which may be empty.
        openings: for each call, what may open it.
        again: texts behind which another call may come, none empty; each ends in the beginning that all openings share.
        shared: that beginning.

    Raises:
        AmbiguousError: one opening begins another, or a text leads to two of them.

    Attributes:
        table: int32[states, 256]; `DEAD` where a byte is refused, and everywhere behind an opening's end.
        ends: for each state the call whose opening ended there; -1 elsewhere.
        is_end: bool[states], whether an opening ended there.
        only: for each state the only call that is left there; -1 where there are several.
        again: for each of the texts, the states before each of its bytes.
        behind: the state behind any of those texts.
    """

    def __init__(
        self,
        opens: Sequence[bytes],
        openings: Sequence[Sequence[Opening]],
        again: Sequence[bytes] = (),
        shared: bytes = b"",
    ) -> None:
        trie = _Trie()
        for call, ways in enumerate(openings):
            for way in ways:
                trie.insert(way, call)
        inner = trie.text([0], shared)
        lines = [trie.line(text, inner) for text in again]
        numbers = {trie.closed({trie.lead(opens)}): 0}
        rows = list(_rows(trie, numbers, [frozenset((node,)) for node in (inner, *chain.from_iterable(lines))]))
        self.behind = numbers[frozenset((inner,))]
        self.again = tuple(tuple(numbers[frozenset((node,))] for node in line) for line in lines)
        self.table = np.full((len(rows), 256), DEAD, np.int32)
        moves = [(number, byte, behind) for number, row in enumerate(rows) for byte, behind in row.items()]
        places = np.array(moves, np.int32).reshape(-1, 3).T
        self.table[places[0], places[1]] = places[2]
        self.ends = [trie.end(nodes) for nodes in numbers]
        self.is_end = np.array(self.ends) >= 0
        self.only = _only(rows, self.ends)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, about."""
        return self.table.nbytes + 64 * len(self.ends)

    def states(self) -> list[State]:
        """The table as states of a network, without what stands behind the openings' ends."""
        return [State(spans=list(_spans(row.tolist()))) for row in self.table]


def _rows(
    trie: _Trie, numbers: dict[frozenset[int], int], more: Iterable[frozenset[int]]
) -> Iterator[dict[int, int]]:
    """For each set of nodes, what each byte leads to; `numbers` gains every set that is reached."""
    for nodes in more:
        numbers.setdefault(nodes, len(numbers))
    waiting = deque(numbers)
    while waiting:
        row = {}
        for byte, behind in trie.moves(waiting.popleft()).items():
            if behind not in numbers:
                numbers[behind] = len(numbers)
                waiting.append(behind)
            row[byte] = numbers[behind]
        yield row


def _spans(row: list[int]) -> Iterator[Span]:
    for target, group in groupby(range(len(row)), key=row.__getitem__):
        values = list(group)
        if target >= 0:
            yield Span(values[0], values[-1], target)


def _only(rows: Sequence[dict[int, int]], ends: Sequence[int]) -> list[int]:
    """The only call that each state leads to, worked out from the ends backwards: the table has no loops."""
    found: list[int | None] = [None if end < 0 else end for end in ends]
    waiting = [number for number, known in enumerate(found) if known is None]  # those found last lie deepest, mostly
    while waiting:
        number = waiting[-1]
        if found[number] is not None:
            waiting.pop()
            continue
        behind = set(rows[number].values())
        missing = [other for other in behind if found[other] is None]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        calls = {found[other] for other in behind}
        found[number] = calls.pop() if len(calls) == 1 else -1
    return [-1 if call is None else call for call in found]
