"""Which steps of a state are worth following where the shortest way is asked for, in compiled code.

Invariants:
- What is left out of a state's steps depends on the state and the vocabulary alone.
- Where the vocabulary does not write every byte, nothing is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_lazy_grammar.core.flat import Arrays

_KEPT = 2
"""Steps to the same state that are kept: those by the most usual bytes."""
_DETOUR = 8
"""Bytes more than the shortest way that a step may lead to."""
_BLANKS = (9, 10, 13, 32)


class Tokens(NamedTuple):
    """The vocabulary for compiled code: see `Pieces`. `slack`: exits dearer than the cheapest whole one by so many tokens are not told."""

    edges: NDArray[np.uint8]
    skips: NDArray[np.int32]
    ends: NDArray[np.bool_]
    roots: NDArray[np.int32]
    ranks: NDArray[np.int32]
    complete: bool
    slack: int


@compiled
def child(tokens: Tokens, node: int, byte: int) -> int:
    """The node behind a byte, of the pieces' trie; 0 where there is none."""
    if node == 0:
        return int(tokens.roots[byte])
    below, end = node + 1, tokens.skips[node]
    while below < end and tokens.edges[below] < byte:
        below = tokens.skips[below]
    return below if below < end and tokens.edges[below] == byte else 0


@compiled
def near(net: Arrays, complete: bool, state: int, through: int) -> bool:  # noqa: FBT001 -- compiled code
    """Whether going on through so many bytes is hardly longer than need be: what is one byte long can not have fewer tokens."""
    shortest = net.shortest[state]
    return not complete or through <= shortest + min(_DETOUR, 2 * shortest)


@compiled
def thinned(net: Arrays, tokens: Tokens, state: int) -> NDArray[np.int32]:
    """int32[_, 2]: byte and target of a state's steps; thinned out where the vocabulary writes every byte."""
    first, last = net.spans_at[state], net.spans_at[state + 1]
    here, blanks = 0, 0
    for k in range(first, last):
        if net.spans[k, 2] == state:
            for byte in range(net.spans[k, 0], net.spans[k, 1] + 1):
                here += 1
                blanks += byte in _BLANKS
    # between JSON elements: how many may follow each other is not the grammar's to say
    only_blanks = here == blanks == len(_BLANKS)
    found = np.empty((256 * (last - first), 2), np.int32)
    count = 0
    for k in range(first, last):
        target = net.spans[k, 2]
        if (target == state and only_blanks) or not near(net, tokens.complete, state, 1 + net.shortest[target]):
            continue
        for byte in range(net.spans[k, 0], net.spans[k, 1] + 1):
            count = _put(found, count, byte, target, tokens)
    return found[:count]


@compiled
def _put(found: NDArray[np.int32], count: int, byte: int, target: int, tokens: Tokens) -> int:
    """Add a step, in place of the worst one to the same target where there are enough; how many there are now."""
    same, worst = 0, -1
    for k in range(count):
        if found[k, 1] == target:
            if found[k, 0] == byte:
                return count
            same += 1
            if worst < 0 or tokens.ranks[found[k, 0]] > tokens.ranks[found[worst, 0]]:
                worst = k
    if not tokens.complete or same < _KEPT:
        found[count, 0], found[count, 1] = byte, target
        return count + 1
    if tokens.ranks[byte] < tokens.ranks[found[worst, 0]]:
        found[worst, 0] = byte
    return count
