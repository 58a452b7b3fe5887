"""The openings of several calls as one table of bytes, and which call each of them leads to.

Invariants:
- No opening begins another, so a text is in one place at a time: what would be in two is an `AmbiguousError`.
- A table is immutable.
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
        values = {byte for node in nodes for byte in self.children[node]}
        return {
            byte: self.closed({self.children[n][byte] for n in nodes if byte in self.children[n]}) for byte in values
        }

    def closed(self, nodes: set[int]) -> frozenset[int]:
        """Some nodes and those that they are at too; without those that lead nowhere any more."""
        if not self.joins.isdisjoint(nodes):
            nodes = {node for node in nodes if self.children[node] or node not in self.joins} | {0}
        if len(nodes) > 1 and any(self.ends[node] >= 0 for node in nodes):
            raise AmbiguousError
        return frozenset(nodes)


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
        start: the state before any text.
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
        self.behind = trie.text([0], shared)
        own = len(trie.ends)
        self.again = tuple(tuple(trie.line(text, self.behind)) for text in again)
        lead = trie.lead(opens)
        rows = [*trie.children]
        numbers = _Numbers(len(rows))
        self.start = numbers.of(trie.closed({lead}))
        for node in range(lead, len(rows)):
            rows[node] = {byte: numbers.of(trie.closed({behind})) for byte, behind in rows[node].items()}
        rows = [*rows, *numbers.rows(trie)]
        self.table = np.full((len(rows), 256), DEAD, np.int32)
        sizes = np.fromiter(map(len, rows), np.intp, len(rows))
        values = np.fromiter(chain.from_iterable(rows), np.intp)
        self.table[np.repeat(np.arange(len(rows)), sizes), values] = np.fromiter(
            chain.from_iterable(row.values() for row in rows), np.int32
        )
        self.ends = trie.ends + [-1] * (len(rows) - len(trie.ends))
        self.is_end = np.array(self.ends) >= 0
        self.only = _only(rows, self.ends, own)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, about."""
        return self.table.nbytes + 64 * len(self.ends)

    def states(self) -> list[State]:
        """The table as states of a network, without what stands behind the openings' ends."""
        return [State(spans=list(_spans(row.tolist()))) for row in self.table]


class _Numbers:
    """States that are several nodes at once get numbers behind those of the nodes."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._known: dict[frozenset[int], int] = {}
        self._waiting: deque[frozenset[int]] = deque()

    def of(self, nodes: frozenset[int]) -> int:
        """The state that is at some nodes."""
        if len(nodes) == 1:
            return next(iter(nodes))
        if nodes not in self._known:
            self._known[nodes] = self._first + len(self._known)
            self._waiting.append(nodes)
        return self._known[nodes]

    def rows(self, trie: _Trie) -> Iterator[dict[int, int]]:
        """What each byte leads to, for each of these states."""
        while self._waiting:
            nodes = self._waiting.popleft()
            yield {byte: self.of(behind) for byte, behind in trie.moves(nodes).items()}


def _spans(row: list[int]) -> Iterator[Span]:
    for target, group in groupby(range(len(row)), key=row.__getitem__):
        values = list(group)
        if target >= 0:
            yield Span(values[0], values[-1], target)


def _only(rows: Sequence[dict[int, int]], ends: Sequence[int], own: int) -> list[int]:
    """The only call that each state leads to; the first `own` states lead to later ones only, the others to any, without loops."""
    found: list[int | None] = [None] * len(rows)
    for number in range(own - 1, -1, -1):
        calls = {found[behind] for behind in rows[number].values()}
        found[number] = ends[number] if ends[number] >= 0 else calls.pop() if len(calls) == 1 else -1
    waiting = list(range(own, len(rows)))
    while waiting:
        number = waiting[-1]
        missing = [behind for behind in set(rows[number].values()) if found[behind] is None]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        calls = {found[behind] for behind in rows[number].values()}
        found[number] = calls.pop() if len(calls) == 1 else -1
    return [-1 if call is None else call for call in found]
