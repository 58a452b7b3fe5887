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

from vllm_lazy_grammar.core.compiled import compiled
from vllm_lazy_grammar.core.network import FAR
from vllm_lazy_grammar.core.shortest import Shortest
from vllm_lazy_grammar.core.stacks import BOTTOM, DEAD, UNKNOWN, Stacks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.matcher import Row
    from vllm_lazy_grammar.core.network import Network
    from vllm_lazy_grammar.core.pieces import Pieces

NEVER = np.iinfo(np.int16).max
"""In costs: no way."""

NOT_OURS = -1000
"""In costs: the network does not take the token, so the row's own bit stands."""

_KEPT_COSTS = 32


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
        self._asked = np.empty((4096, 2), np.int32)

    def advance(self, stand: int, part: int | bytes, piece: bytes) -> int:
        """The stand behind a token (by id, where the grammar names it so; else by its bytes) or behind bytes; negative where there is none."""
        with self._lock:
            named = self._stacks.by_name(stand, part) if isinstance(part, int) else DEAD
            return named if named >= 0 else self._stacks.steps(stand, piece)

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
        while True:
            found = np.zeros(len(stacks.table), np.bool_)
            count = _walk(*nodes, stacks.table, stand, self._path, self._behind_each, found, self._asked)
            if not count:
                return self._behind_each, np.flatnonzero(found).tolist()
            for place, byte in set(map(tuple, self._asked[:count].tolist())):
                stacks.step(place, byte)

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
    stand: int,
    path: NDArray[np.int32],
    behind: NDArray[np.int32],
    found: NDArray[np.bool_],
    asked: NDArray[np.int32],
) -> int:
    """Write the stand behind each token, and mark it in `found`.

    Returns how many (stand, byte) are not in the table yet: they stand in `asked`, and below them nothing is done.
    """
    behind[:] = DEAD
    path[0] = stand
    count, node = 0, 1
    while node < len(edges) and count < len(asked):
        depth = depths[node]
        after = table[path[depth - 1], edges[node]]
        if after < 0:
            if after == UNKNOWN:
                asked[count, 0], asked[count, 1] = path[depth - 1], edges[node]
                count += 1
            node = skips[node]
            continue
        path[depth] = after
        for k in range(firsts[node], firsts[node + 1]):
            behind[tokens[k]] = after
            found[after] = True
        node += 1
    return count


def warm() -> None:
    """Compile, or load from numba's cache, the compiled functions of this module, so that no request's step does."""
    i32 = np.zeros(1, np.int32)
    nodes = (np.zeros(1, np.uint8), i32, i32, i32, i32)
    table, found, asked = np.full((1, 256), DEAD, np.int32), np.zeros(1, np.bool_), np.zeros((1, 2), np.int32)
    _walk(*nodes, table, 0, i32.copy(), i32.copy(), found, asked)
