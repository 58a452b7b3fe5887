"""The fewest tokens from a place in a grammar to the end of its rule, by what of a token is left open there.

A place is a state of the network and a node of the vocabulary's trie: the bytes of a token that has begun and not ended. A token may begin in
one rule and end in another, so a rule does not have one length: it has one for each node at which it can be left.

The numbers are a fixed point; it is worked out in `solving`.

Invariants:
- Every way counted is a text of the grammar, spelled by tokens of the trie that are not excluded.
- Where nothing is thinned out the numbers are exact. Where a vocabulary writes every byte, what cannot matter much is left out: of many bytes
  that lead to the same state all but a few, and steps that are some bytes longer than the shortest; then the numbers are those of the
  shortest text among the rest.
- What is left out depends on the state alone, so the token that begins a shortest way leads to a place that is one token nearer.
- A place once worked out never changes; ids of places ascend, so those below the first one of a computation are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.flat import UNKNOWN, Flat
from vllm_lazy_grammar.core.network import FAR
from vllm_lazy_grammar.core.solving import CALLER_COUNT, PLACES, STATE, WAITING_COUNT, nothing, read, solve
from vllm_lazy_grammar.core.thinning import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.network import Network
    from vllm_lazy_grammar.core.pieces import Pieces

_EXITS_BYTES = 400
_SLACK = 2

Place = tuple[int, int]
"""(state, node of the trie)"""

Exits = dict[int, int]
"""Node at which the rule is left -> fewest tokens completed until there."""

EFFORT = 50_000
"""Places that may be worked out for one grammar."""


class TooMuchError(Exception):
    """Finding out would take too long; the grammar is served without a budget."""


class Shortest:
    """Fewest tokens, worked out as they are asked for and kept.

    Args:
        network: the grammar.
        pieces: the vocabulary's tokens, without those that are never text.
    """

    def __init__(self, network: Network, pieces: Pieces) -> None:
        nodes, complete = pieces.nodes, pieces.complete
        self._flat = Flat(network)
        self._tokens = Tokens(
            nodes.edges,
            nodes.skips,
            pieces.ends_each,
            pieces.roots,
            pieces.ranks,
            complete,
            _SLACK if complete else FAR,
        )
        self._known = nothing(len(self._flat.arrays.final))
        self._exits: dict[Place, Exits] = {}

    def exits(self, state: int, node: int) -> Exits:
        """Where the rule can be left, coming from this place, and with how many tokens. TooMuchError past `EFFORT` places."""
        place = (state, node)
        known = self._exits.get(place)
        if known is None:
            self.ahead((place,))
            nodes, tokens = read(self._known, state, node)
            known = self._exits[place] = dict(zip(nodes.tolist(), tokens.tolist(), strict=True))
        return known

    def ahead(self, places: Iterable[Place]) -> None:
        """Work out some places and all they depend on. TooMuchError past `EFFORT` places."""
        asked = np.array([place for place in places if place not in self._exits], np.int32).reshape(-1, 2)
        if not len(asked) or self._solved(asked):
            return
        self._known = nothing(len(self._flat.arrays.final))  # make room, and try once more
        if not self._solved(asked):
            self._known = nothing(len(self._flat.arrays.final))
            raise TooMuchError

    @property
    def places(self) -> int:
        """How many are kept."""
        return int(self._known.counts[PLACES])

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        return sum(array.nbytes for array in self._known) + len(self._exits) * _EXITS_BYTES

    def _solved(self, asked: NDArray[np.int32]) -> bool:
        """Work out some places; false, and what is known is of no use, where that needs more room than there is."""
        base, parked = self.places, np.empty(0, np.int32)
        while True:
            self._fit()
            self._known, parked = solve(self._flat.arrays, self._tokens, self._known, asked, parked, base, EFFORT)
            if self.places > EFFORT:
                return False
            if not len(parked):
                break
            asked = asked[:0]
            for state in set(self._known.places[parked, STATE].tolist()):
                if self._flat.arrays.following[state] == UNKNOWN:
                    self._flat.follow(state)
        self._known.counts[[WAITING_COUNT, CALLER_COUNT]] = 0
        return True

    def _fit(self) -> None:
        """Take in states that the network gained."""
        self._flat.extend()
        lacking = len(self._flat.arrays.final) - len(self._known.bytes_at)
        if lacking:
            more = np.full((lacking, 2), -1, np.int32)
            self._known = self._known._replace(bytes_at=np.concatenate((self._known.bytes_at, more)))
