"""How one grammar's texts can end in time: fewest tokens to the end from where a text stands, and which tokens keep it near enough.

Invariants:
- A number of tokens that is answered can be kept: as long as it fits, some token leads to a place from where one token fewer is needed.
- A row only loses bits here. Ids that the network does not take by their bytes or by name (control tokens that a literal spells) are left to
  the caller.
- Shared by all requests of a grammar; one lock, held while something is worked out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.byte_trie import ByteTrie
from vllm_lazy_grammar.core.compiled import compiled
from vllm_lazy_grammar.core.network import FAR, Network, Span, State
from vllm_lazy_grammar.core.pieces import Pieces
from vllm_lazy_grammar.core.shortest import EFFORT, Shortest, TooMuchError
from vllm_lazy_grammar.core.stacks import BOTTOM, DEAD, STANDS, UNKNOWN, Stacks
from vllm_lazy_grammar.core.vocabulary import Vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.matcher import Row

NEVER = np.iinfo(np.int16).max
"""In costs: no way."""

NOT_OURS = -1000
"""In costs: the network does not take the token, so the row's own bit stands."""

_KEPT_COSTS = 32

_AHEAD = 256
"""Stands that are looked at ahead, the nearest to the start first."""

_AT_ONCE = 32
_NO_BYTE = -1
_STATE_BYTES = 800
"""A state of a network, about."""


class Costs(NamedTuple):
    """What each token leads to.

    Args:
        after: int16, one entry for each bit of a row: tokens needed behind it, `NEVER` where there is no way; `NOT_OURS` for a token that the
            network does not take.
        largest: the largest number in it.
    """

    after: NDArray[np.int16]
    largest: int


class Endings:
    """The endings of one grammar for one vocabulary.

    Args:
        network: the grammar.
        pieces: the vocabulary's tokens.
        row_words: words of a mask row.

    Attributes:
        start: the stand at the grammar's start.
    """

    def __init__(self, network: Network, pieces: Pieces, row_words: int) -> None:
        self._network, self._pieces, self._row_words = network, pieces, row_words
        self._shortest = Shortest(network, pieces)
        self._stacks = Stacks(network)
        self.start = self._stacks.start
        self._behind: dict[tuple[int, int], int] = {}
        self._needs: dict[int, int] = {}
        self._costs: OrderedDict[int, Costs] = OrderedDict()
        self._lock = threading.RLock()
        self._path = np.zeros(int(pieces.nodes.depths.max()) + 1, np.int32)
        self._behind_each = np.empty(row_words * 32, np.int32)

    def advance(self, stand: int, part: int | bytes, piece: bytes) -> int:
        """The stand behind a token (by id, where the grammar names it so; else by its bytes) or behind bytes; negative where there is none."""
        with self._lock:
            named = self._stacks.by_name(stand, part) if isinstance(part, int) else DEAD
            return named if named >= 0 else self._stacks.steps(stand, piece)

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        costs = len(self._costs) * self._row_words * 32 * np.dtype(np.int16).itemsize
        states = len(self._network.states) * _STATE_BYTES
        return states + self._stacks.nbytes + self._shortest.nbytes + costs + self._behind_each.nbytes

    def prepare(self) -> None:
        """Work out ahead what the first looks ask for: the start's numbers, and the stands nearest to it. TooMuchError where the start's can not be."""
        with self._lock:
            self._need(self.start)
            stands = self._nearest()
            for place in range(0, len(stands), _AT_ONCE):
                if self._shortest.places > EFFORT // 4:
                    break
                self._ask(stands[place : place + _AT_ONCE])
                for stand in stands[place : place + _AT_ONCE]:
                    self._need(stand)
            if self.start >= 0:
                self.costs(self.start)

    def _nearest(self) -> list[int]:
        """Stands that few bytes lead to from the start."""
        stacks, found = self._stacks, [self.start] if self.start >= 0 else []
        seen = {self.start, DEAD, UNKNOWN}
        for stand in found:
            if len(found) >= _AHEAD:
                break
            try:
                stacks.step(stand, 0)
            except TooMuchError:
                continue
            fresh = [other for other in dict.fromkeys(stacks.table[stand].tolist()) if other not in seen]
            seen.update(fresh)
            found.extend(fresh)
        return found

    def _ask(self, stands: list[int]) -> None:
        """Have the numbers of some stands worked out in one go, as far as the stacks' tops go."""
        fresh = [stand for stand in stands if stand not in self._needs]
        self._shortest.ahead({(state, 0) for stand in fresh for state, _ in self._stacks.items[stand]})

    def needs(self, stand: int) -> int:
        """Fewest tokens until the text may end; `NEVER` or more where there is no way. TooMuchError where that can not be found out."""
        with self._lock:
            return self._need(stand)

    def _need(self, stand: int) -> int:
        if stand < 0:
            return NEVER
        known = self._needs.get(stand)
        if known is None:
            known = self._needs[stand] = 0 if self._stacks.complete[stand] else self._least(stand)
        return known

    def _least(self, stand: int) -> int:
        ways = (
            tokens + self._rest(stack, node)
            for state, stack in self._stacks.items[stand]
            for node, tokens in self._shortest.exits(state, 0).items()
        )
        return min(ways, default=FAR)

    def _rest(self, stack: int, node: int) -> int:
        """Fewest tokens from where a rule was left at `node` with this stack to return to."""
        if stack == BOTTOM:
            return FAR if node else 0
        known = self._behind.get((stack, node))
        if known is None:
            state, below = self._stacks.frames[stack]
            ways = (tokens + self._rest(below, left) for left, tokens in self._shortest.exits(state, node).items())
            known = self._behind[stack, node] = min(ways, default=FAR)
        return known

    def costs(self, stand: int) -> Costs:
        """What each token leads to from here; kept for a few stands. TooMuchError where that can not be found out."""
        with self._lock:
            known = self._costs.get(stand)
            if known is None:
                known = self._costs[stand] = self._work_out(stand)
                if len(self._costs) > _KEPT_COSTS:
                    self._costs.popitem(last=False)
            self._costs.move_to_end(stand)
            return known

    def _work_out(self, stand: int) -> Costs:
        behind, found = self._walked(stand)
        self._ask(found)
        prices = np.full(len(self._stacks.table) + 1, NEVER, np.int16)  # one more at the end, which is that of DEAD
        for place in found:
            prices[place] = min(self._need(place), NEVER)
        prices[-1] = NOT_OURS
        after: NDArray[np.int16] = prices[behind]
        for token, need in self._named(stand).items():
            after[token] = min(need, NEVER)
        return Costs(after, int(after.max()))

    def _walked(self, stand: int) -> tuple[NDArray[np.int32], list[int]]:
        """The stand behind each id, `DEAD` where the network does not take it; and which stands these are."""
        nodes, stacks = self._pieces.nodes, self._stacks
        found = np.zeros(STANDS, np.bool_)
        lacking = np.full(STANDS, _NO_BYTE, np.int16)
        self._behind_each.fill(DEAD)
        waiting = np.array([[0, stand]], np.int32)
        while len(waiting):
            waiting = _walk(*nodes, stacks.table, waiting, self._path, self._behind_each, found, lacking)
            for place in np.flatnonzero(lacking != _NO_BYTE).tolist():  # one byte of each stand: its row is filled
                stacks.step(place, int(lacking[place]))
                lacking[place] = _NO_BYTE
        return self._behind_each, np.flatnonzero(found).tolist()

    def _named(self, stand: int) -> dict[int, int]:
        states = self._network.states
        names = (
            token for number, _ in self._stacks.items[stand] for named in states[number].named for token in named.tokens
        )
        return {token: self._need(self._stacks.by_name(stand, token)) for token in names}

    def mask(self, stand: int, row: Row, limit: int) -> bool:
        """Clear the tokens of the network behind which more than `limit` tokens are needed; false, and nothing changed, where there are none."""
        costs = self.costs(stand)
        if costs.largest <= limit:
            return False
        row &= np.packbits(costs.after <= limit, bitorder="little").view(np.int32)
        return True


@compiled
def _walk(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    edges: NDArray[np.uint8],
    depths: NDArray[np.int32],
    skips: NDArray[np.int32],
    firsts: NDArray[np.int32],
    tokens: NDArray[np.int32],
    table: NDArray[np.int32],
    waiting: NDArray[np.int32],
    path: NDArray[np.int32],
    behind: NDArray[np.int32],
    found: NDArray[np.bool_],
    lacking: NDArray[np.int16],
) -> NDArray[np.int32]:
    """Write the stand behind each token below some nodes, and mark it in `found`.

    `waiting` has these nodes, and for each the stand before its byte.

    Returns the places where the table has no entry yet: int32[_, 2], node and stand; nothing was done below them. `lacking` is given a byte of
    each such stand: they are few, and the places are many.
    """
    asked, count = np.empty((64, 2), np.int32), 0
    for k in range(len(waiting)):
        node = waiting[k, 0]
        end = skips[node] if node else len(edges)
        path[depths[node] - 1 if node else 0] = waiting[k, 1]
        node = node or 1
        while node < end:
            depth = depths[node]
            after = table[path[depth - 1], edges[node]]
            if after < 0:
                if after == UNKNOWN:
                    if count == len(asked):
                        grown = np.empty((2 * count, 2), np.int32)
                        for i in range(count):  # a slice that is assigned takes numba seconds to compile
                            grown[i, 0], grown[i, 1] = asked[i, 0], asked[i, 1]
                        asked = grown
                    asked[count, 0], asked[count, 1] = node, path[depth - 1]
                    lacking[path[depth - 1]] = edges[node]
                    count += 1
                node = skips[node]
                continue
            path[depth] = after
            for i in range(firsts[node], firsts[node + 1]):
                behind[tokens[i]] = after
                found[after] = True
            node += 1
    return asked[:count].copy()


def warm() -> None:
    """Compile, or load from numba's cache, the compiled functions of this module, so that no request's step does."""
    network = Network([State(spans=[Span(97, 97, 1)]), State(final=True)], 0)
    vocabulary = Vocabulary([b"a", b""], 2)
    Endings(network, Pieces(ByteTrie(vocabulary), frozenset()), vocabulary.row_words).prepare()
