"""Which tokens survive a byte-level automaton, answered for a whole vocabulary in one walk over its prefixes.

Nodes lie in depth-first order. Each knows its edge's byte, its depth and where its subtree ends, so a refused edge prunes everything below it
with one assignment. Tokens lie in the same order, so those at or below a node are one slice.

Invariants:
- There is one node per distinct prefix of a piece, the root included.
- A walk allocates nothing in proportion to the vocabulary, and writes every word of the row it is given.
- Control tokens are in a trie of their own: a walk allows them only where it is asked to, but `hitting` reports them,
  since their text is text.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.compiled import compiled
from vllm_lazy_grammar.core.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.matcher import Matcher, Row

DEAD = -1
"""In a table: no state, the byte is refused."""


class Nodes(NamedTuple):
    """A trie in depth-first order.

    Args:
        edges: uint8[nodes], the byte that leads to a node (the root's is unused).
        depths: int32[nodes].
        skips: int32[nodes], the first node behind the subtree.
        firsts: int32[nodes + 1], place in `tokens` of the first token at or below a node.
        tokens: int32[tokens], ids in the order of their bytes, equal ones by id.
    """

    edges: NDArray[np.uint8]
    depths: NDArray[np.int32]
    skips: NDArray[np.int32]
    firsts: NDArray[np.int32]
    tokens: NDArray[np.int32]


class _Scratch(threading.local):
    """What a walk writes besides its answer: the states on the path, and ids found. One per thread, made once."""

    def __init__(self, depth: int, tokens: int) -> None:
        self.path = np.zeros((2, depth + 1), np.int32)
        self.found = np.zeros(tokens, np.int32)


class ByteTrie:
    """The pieces of a vocabulary as a trie; immutable and shared by all threads.

    Args:
        vocabulary: whose pieces; ids without bytes are left out, control tokens are kept apart.

    Attributes:
        vocabulary: the same.
        row_words: words of a mask row.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = vocabulary.pieces
        special = vocabulary.special_ids
        self.vocabulary = vocabulary
        self.row_words = vocabulary.row_words
        self._ordinary = _build(pieces, (token for token, piece in enumerate(pieces) if piece and token not in special))
        self._control = _build(pieces, (token for token in special if pieces[token]))
        depth = max(int(nodes.depths.max()) for nodes in (self._ordinary, self._control))
        self._scratch = _Scratch(depth, max(len(self._ordinary.tokens), len(self._control.tokens)))

    def __len__(self) -> int:
        """Nodes, the root included, control tokens apart."""
        return len(self._ordinary.edges)

    @property
    def nodes(self) -> Nodes:
        """The trie of all tokens but control tokens; not to be changed."""
        return self._ordinary

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, the scratch space of threads apart."""
        return sum(array.nbytes for nodes in (self._ordinary, self._control) for array in nodes)

    def survivors(self, table: NDArray[np.int32], state: int, row: Row, *, control: bool = False) -> None:
        """Write the row of exactly those tokens all of whose bytes the automaton accepts, one after the other.

        Args:
            table: int32[states, 256], the state behind each byte, -1 where it is refused.
            state: where the automaton stands.
            row: ``row_words`` int32 words, all of them written; ids without bytes and padding are never allowed.
            control: take control tokens by their text too; they are never allowed otherwise.
        """
        row.fill(0)
        path = self._scratch.path[0]
        _survivors(*self._ordinary, table, state, path, row)
        if control:
            _survivors(*self._control, table, state, path, row)

    def hitting(
        self, table: NDArray[np.int32], hits: NDArray[np.bool_], state: int, beyond: int = DEAD
    ) -> NDArray[np.int32]:
        """The ids of the tokens, control tokens included, during which the automaton enters a hit state, in ascending order.

        Args:
            table: int32[states, 256], complete: no byte is refused.
            hits: bool[states].
            state: where the automaton stands.
            beyond: another state to compare with. Where the walks from both have come to the same state, everything below is left
                out, since it hits from one where it hits from the other. For an automaton that searches for words, with its start
                here, only the tokens that go on with a word already begun are looked at: a few microseconds instead of a full walk.
        """
        scratch = self._scratch
        parts = []
        for nodes in (self._ordinary, self._control):
            count = _hitting(*nodes, table, hits, state, beyond, scratch.path, scratch.found)
            parts.append(np.sort(scratch.found[:count]))
        return np.sort(np.concatenate(parts)) if len(parts[1]) else parts[0]

    def entered(self, table: NDArray[np.int32], wanted: NDArray[np.bool_], state: int) -> NDArray[np.int32]:
        """Where tokens enter a wanted state with bytes left over, control tokens apart: int32[_, 2], the node and the state.

        Args:
            table: int32[states, 256], -1 where a byte is refused.
            wanted: bool[states].
            state: where the automaton stands.
        """
        edges, depths, skips, firsts, _ = self._ordinary
        return _entered(edges, depths, skips, firsts, table, wanted, state, self._scratch.path[0])

    def tokens_below(self, node: int) -> list[int]:
        """The tokens that begin with a node's bytes and have more."""
        firsts, skips = self._ordinary.firsts, self._ordinary.skips
        found: list[int] = self._ordinary.tokens[firsts[node + 1] : firsts[skips[node]]].tolist()
        return found

    def below(self, node: int, matcher: Matcher, row: Row) -> None:
        """Set those of the tokens below a node whose further bytes a matcher takes from where it stands; it is left there."""
        nodes, begin = self._ordinary, matcher.steps
        top, here, end = int(nodes.depths[node]), node + 1, int(nodes.skips[node])
        while here < end:
            steps = matcher.steps - begin
            above = int(nodes.depths[here]) - top - 1
            matcher.rollback(steps - above)
            if not matcher.accept_bytes(bytes((int(nodes.edges[here]),))):
                here = int(nodes.skips[here])
                continue
            for token in nodes.tokens[nodes.firsts[here] : nodes.firsts[here + 1]].tolist():
                row[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).view(np.int32))
            here += 1
        matcher.rollback(matcher.steps - begin)


def _build(pieces: Sequence[bytes], ids: Iterable[int]) -> Nodes:
    ordered = sorted(sorted(ids), key=pieces.__getitem__)  # equal pieces stay in the order of their ids
    lengths = np.fromiter((len(pieces[token]) for token in ordered), np.int64, len(ordered))
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    text = np.frombuffer(b"".join([pieces[token] for token in ordered]), np.uint8).copy()
    edges, depths, skips, firsts = _lay_out(text, starts)
    return Nodes(edges, depths, skips, firsts, np.asarray(ordered, np.int32))


def warm() -> None:
    """Compile, or load from numba's cache, all compiled functions of this module, so that no request's step does."""
    trie = ByteTrie(Vocabulary([b"a", b"b"], 2, special_ids=[1]))
    row = np.zeros(1, np.int32)
    for frozen in (False, True):
        table, hits = np.zeros((1, 256), np.int32), np.zeros(1, np.bool_)
        table.setflags(write=not frozen)
        hits.setflags(write=not frozen)
        trie.survivors(table, 0, row)
        trie.hitting(table, hits, 0)
        trie.entered(table, hits, 0)


@compiled
def _shared_prefix(text: NDArray[np.uint8], a: int, a_end: int, b: int, b_end: int) -> int:
    length = 0
    while a + length < a_end and b + length < b_end and text[a + length] == text[b + length]:
        length += 1
    return length


@compiled
def _lay_out(
    text: NDArray[np.uint8], starts: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    tokens = len(starts) - 1
    shared = np.zeros(tokens, np.int64)
    for k in range(1, tokens):
        shared[k] = _shared_prefix(text, starts[k - 1], starts[k], starts[k], starts[k + 1])
    nodes = 1 + len(text) - shared.sum()
    edges, depths = np.zeros(nodes, np.uint8), np.zeros(nodes, np.int32)
    skips, firsts = np.full(nodes, nodes, np.int32), np.full(nodes + 1, tokens, np.int32)
    firsts[0] = 0
    path = np.zeros(len(text) + 1, np.int32)
    node = 1
    open_depth = 0
    for k in range(tokens):
        for depth in range(shared[k] + 1, open_depth + 1):
            skips[path[depth]] = node
        open_depth = starts[k + 1] - starts[k]
        for depth in range(shared[k], open_depth):
            edges[node], depths[node], firsts[node] = text[starts[k] + depth], depth + 1, k
            path[depth + 1] = node
            node += 1
    return edges, depths, skips, firsts


@compiled
def _survivors(  # noqa: PLR0913, PLR0917 - compiled code takes arrays, not objects
    edges: NDArray[np.uint8],
    depths: NDArray[np.int32],
    skips: NDArray[np.int32],
    firsts: NDArray[np.int32],
    tokens: NDArray[np.int32],
    table: NDArray[np.int32],
    state: int,
    path: NDArray[np.int32],
    row: Row,
) -> None:
    path[0] = state
    node = 1
    while node < len(edges):
        depth = depths[node]
        after = table[path[depth - 1], edges[node]]
        if after < 0:
            node = skips[node]
            continue
        path[depth] = after
        for k in range(firsts[node], firsts[node + 1]):
            row[tokens[k] >> 5] |= np.int32(1) << (tokens[k] & 31)
        node += 1


@compiled
def _hitting(  # noqa: PLR0913, PLR0917 - compiled code takes arrays, not objects
    edges: NDArray[np.uint8],
    depths: NDArray[np.int32],
    skips: NDArray[np.int32],
    firsts: NDArray[np.int32],
    tokens: NDArray[np.int32],
    table: NDArray[np.int32],
    hits: NDArray[np.bool_],
    state: int,
    beyond: int,
    paths: NDArray[np.int32],
    found: NDArray[np.int32],
) -> int:
    path, other = paths[0], paths[1]
    path[0], other[0] = state, beyond
    count = 0
    node = 1
    while node < len(edges):
        depth = depths[node]
        after = table[path[depth - 1], edges[node]]
        if beyond >= 0:
            other[depth] = table[other[depth - 1], edges[node]]
        if hits[after]:
            for k in range(firsts[node], firsts[skips[node]]):
                found[count] = tokens[k]
                count += 1
            node = skips[node]
        elif beyond >= 0 and other[depth] == after:
            node = skips[node]
        else:
            path[depth] = after
            node += 1
    return count


@compiled
def _entered(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    edges: NDArray[np.uint8],
    depths: NDArray[np.int32],
    skips: NDArray[np.int32],
    firsts: NDArray[np.int32],
    table: NDArray[np.int32],
    wanted: NDArray[np.bool_],
    state: int,
    path: NDArray[np.int32],
) -> NDArray[np.int32]:
    found, count = np.empty((16, 2), np.int32), 0
    path[0] = state
    node = 1
    while node < len(edges):
        depth = depths[node]
        after = table[path[depth - 1], edges[node]]
        if after < 0:
            node = skips[node]
            continue
        path[depth] = after
        if wanted[after]:
            if firsts[node + 1] < firsts[skips[node]]:
                if count == len(found):
                    grown = np.empty((2 * count, 2), np.int32)
                    for i in range(count):  # a slice that is assigned takes numba seconds to compile
                        grown[i, 0], grown[i, 1] = found[i, 0], found[i, 1]
                    found = grown
                found[count, 0], found[count, 1] = node, after
                count += 1
            node = skips[node]
            continue
        node += 1
    return found[:count].copy()
