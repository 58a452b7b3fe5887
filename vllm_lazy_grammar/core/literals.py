"""Aho-Corasick over bytes: where does one of many literal texts end?

Invariants:
- The state after any bytes depends on those bytes alone, one table look-up per byte, however many texts there are.
- The table is complete: every state has a successor for every byte; state 0 is the root.
- Nothing changes after construction.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Edges = list[dict[int, int]]


def _trie(texts: Sequence[bytes]) -> tuple[Edges, list[list[int]]]:
    """Children of each node, and which texts end in it."""
    edges: Edges = [{}]
    ending: list[list[int]] = [[]]
    for index, text in enumerate(texts):
        node = 0
        for byte in text:
            if byte not in edges[node]:
                edges[node][byte] = len(edges)
                edges.append({})
                ending.append([])
            node = edges[node][byte]
        ending[node].append(index)
    return edges, ending


class LiteralAutomaton:
    """All `texts` at once; immutable, shared.

    Attributes:
        texts: the literals, none empty; two may be the same.
        table: int32, shape ``(states, 256)``: the next state.
        hits: bool, shape ``(states,)``: whether some literal ends in the state.
        depth: int32, shape ``(states,)``: how many of the last bytes the state remembers.
        outputs: per state the indices into `texts` of the literals that end there, the longest first.
    """

    __slots__ = ("_flat", "_hit", "depth", "hits", "outputs", "table", "texts")

    def __init__(self, texts: Sequence[bytes]) -> None:
        if not all(texts):
            raise ValueError("a literal can not be empty")
        self.texts = tuple(texts)
        edges, ending = _trie(self.texts)
        self.table: NDArray[np.int32] = np.zeros((len(edges), 256), np.int32)
        self.depth: NDArray[np.int32] = np.zeros(len(edges), np.int32)
        self.outputs: tuple[tuple[int, ...], ...] = self._link(edges, ending)
        self.hits: NDArray[np.bool_] = np.array([bool(found) for found in self.outputs], np.bool_)
        for array in (self.table, self.depth, self.hits):
            array.flags.writeable = False
        self._flat = self.table.reshape(-1).data
        self._hit = self.hits.tobytes()

    def _link(self, edges: Edges, ending: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        """Fill the table breadth first: a node's row is its failure node's row with its own children laid over it."""
        fail = [0] * len(edges)
        outputs = [tuple(found) for found in ending]
        queue = deque([0])
        while queue:
            node = queue.popleft()
            row = self.table[fail[node]].copy()
            for byte, child in edges[node].items():
                fail[child] = int(row[byte]) if node else 0
                row[byte] = child
                self.depth[child] = self.depth[node] + 1
                queue.append(child)
            self.table[node] = row
            if node:
                outputs[node] += outputs[fail[node]]
        return tuple(outputs)

    @property
    def nbytes(self) -> int:
        """Memory of the tables, in bytes."""
        return self.table.nbytes + self.depth.nbytes + 2 * self.hits.nbytes

    def scan(self, state: int, data: bytes | bytearray) -> tuple[int, list[tuple[int, int]]]:
        """The state behind `data`, and on the way ``(bytes consumed, state)`` wherever a literal ends."""
        flat, hit = self._flat, self._hit
        ends: list[tuple[int, int]] = []
        for at, byte in enumerate(data, 1):
            state = flat[state << 8 | byte]
            if hit[state]:
                ends.append((at, state))
        return state, ends
