"""The vocabulary's trie as the search for short endings walks it: one byte down, does a token end here, which bytes make long tokens.

Invariants:
- Excluded ids are never the end of a token; special tokens are not in the trie at all.
- Node 0 is the root; no byte leads to it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.byte_trie import ByteTrie

_RUN = 8


class Pieces:
    """Tokens as nodes of a trie.

    Args:
        trie: its pieces.
        excluded: ids that are never text: control tokens and stop ids.

    Attributes:
        complete: every printable ASCII character has a token of its own, so that what is spelled byte by byte can be relied on. (Byte-level
            vocabularies may lack bytes that no text has, and an id of `excluded` may be one of these.)
    """

    def __init__(self, trie: ByteTrie, excluded: frozenset[int]) -> None:
        self.nodes = trie.nodes
        self._excluded = excluded
        self._children: dict[int, dict[int, int]] = {}
        self._ends: dict[int, bool] = {}
        self.complete = all(self._is_piece(byte) for byte in range(0x20, 0x7F))
        self._runs = {byte: self._run(byte) for byte in range(256)}

    def child(self, node: int, byte: int) -> int:
        """The node behind one byte more; 0 where no token goes on so."""
        children = self._children.get(node)
        if children is None:
            children = self._children[node] = self._read(node)
        return children.get(byte, 0)

    def _read(self, node: int) -> dict[int, int]:
        edges, skips = self.nodes.edges, self.nodes.skips
        end = int(skips[node]) if node else len(edges)
        children, below = {}, node + 1
        while below < end:
            children[int(edges[below])] = below
            below = int(skips[below])
        return children

    def ends(self, node: int) -> bool:
        """Whether a token ends here."""
        known = self._ends.get(node)
        if known is None:
            first, last = int(self.nodes.firsts[node]), int(self.nodes.firsts[node + 1])
            here = self.nodes.tokens[first:last].tolist()
            known = self._ends[node] = any(token not in self._excluded for token in here)
        return known

    @cached_property
    def ends_each(self) -> NDArray[np.bool_]:
        """bool[nodes]: whether a token ends there."""
        text = ~np.isin(self.nodes.tokens, np.fromiter(self._excluded, np.int32, len(self._excluded)))
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(text)))[self.nodes.firsts]
        return np.diff(before) > 0

    @cached_property
    def roots(self) -> NDArray[np.int32]:
        """int32[256]: the node of each first byte, 0 where there is none."""
        return np.array([self.child(0, byte) for byte in range(256)], np.int32)

    @cached_property
    def ranks(self) -> NDArray[np.int32]:
        """int32[256]: the place of each byte in the order of `rank`."""
        places = np.empty(256, np.int32)
        places[sorted(range(256), key=self.rank)] = np.arange(256)
        return places

    def _run(self, byte: int) -> int:
        node = length = deepest = 0
        while node := self.child(node, byte):
            length += 1
            deepest = length if self.ends(node) else deepest
        return deepest

    def _is_piece(self, byte: int) -> bool:
        node = self.child(0, byte)
        return bool(node) and self.nodes.firsts[node] < self.nodes.firsts[node + 1]

    def _is_token(self, byte: int) -> bool:
        node = self.child(0, byte)
        return bool(node) and self.ends(node)

    def rank(self, byte: int) -> tuple[bool, bool, int, int]:
        """Order in which bytes that lead to the same state are worth trying: those that are tokens, and that tokens repeat some times, come first.

        Runs of dozens (blanks, dashes) make as many places to stop at, for little.
        """
        run = self._runs[byte]
        return not self._is_token(byte), run > _RUN, -run, byte
