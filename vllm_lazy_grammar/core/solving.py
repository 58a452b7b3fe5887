"""The fixed point behind `shortest`, in compiled code: what a place can do is told to those that wait for it, the smallest numbers first.

Invariants:
- A place is told of once for each of its numbers; numbers of a place and node only fall.
- Tables grow by doubling; a row once written keeps its place.
- What is left out of a state's steps depends on the state and the vocabulary alone.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.compiled import compiled
from vllm_lazy_grammar.core.flat import UNKNOWN, Arrays
from vllm_lazy_grammar.core.network import FAR

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT = 2
_DETOUR = 8
_BLANKS = (9, 10, 13, 32)

STATE, _NODE, _EXITS, _WAITING, _CALLERS, _WHOLE = range(6)  # columns of places
_TOKENS = _NEXT_WAITING = _NEXT_CALLER = (
    2  # columns of exits, of those that wait and of callers, behind (place, node / more / target)
)
_NEXT_EXIT = 3
_FOLLOW, _CALL = 0, 1


class Tokens(NamedTuple):
    """The vocabulary for compiled code: see `Pieces`. `slack`: exits dearer than the cheapest whole one by so many tokens are not told."""

    edges: NDArray[np.uint8]
    skips: NDArray[np.int32]
    ends: NDArray[np.bool_]
    roots: NDArray[np.int32]
    ranks: NDArray[np.int32]
    complete: bool
    slack: int


class Known(NamedTuple):
    """What was worked out, and what it takes to go on.

    Args:
        places: int32[places, 6]: state, node, first exit, first that waits, first caller, tokens to its cheapest exit at the root.
        exits: int32[exits, 4]: place, node, tokens, next exit of the place.
        waiting: int32[_, 3]: who can do what the place can do, for how many tokens more, next.
        callers: int32[_, 3]: who calls the place, the state behind the call, next.
        place_table: int32[2^n]: places by state and node.
        exit_table: int32[2^n]: exits by place and node.
        bytes_: int32[_, 2]: byte and target of each state, thinned out.
        bytes_at: int32[states, 2]: where a state's begin and end; -1 where it was not asked for.
        counts: int64[6]: how many rows of the five tables are in use, and how many places were begun.
    """

    places: NDArray[np.int32]
    exits: NDArray[np.int32]
    waiting: NDArray[np.int32]
    callers: NDArray[np.int32]
    place_table: NDArray[np.int32]
    exit_table: NDArray[np.int32]
    bytes_: NDArray[np.int32]
    bytes_at: NDArray[np.int32]
    counts: NDArray[np.int64]


PLACES, _EXIT_COUNT, WAITING_COUNT, CALLER_COUNT, _BYTES, _BEGUN = range(6)


def nothing(states: int) -> Known:
    """Where nothing is worked out yet, of a network with so many states."""

    def rows(width: int) -> NDArray[np.int32]:
        return np.empty((64, width), np.int32)

    def table() -> NDArray[np.int32]:
        return np.full(256, -1, np.int32)

    bytes_at = np.full((states, 2), -1, np.int32)
    return Known(rows(6), rows(4), rows(3), rows(3), table(), table(), rows(2), bytes_at, np.zeros(6, np.int64))


@compiled
def _slot(table: NDArray[np.int32], rows: NDArray[np.int32], a: int, b: int) -> int:
    """Where in a table the row that begins with (a, b) stands, or would."""
    last = len(table) - 1
    slot = ((a * 40503) ^ (b * 2654435761)) & last
    while table[slot] >= 0 and (rows[table[slot], 0] != a or rows[table[slot], 1] != b):
        slot = (slot + 1) & last
    return slot


@compiled
def _wider(table: NDArray[np.int32], rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    found = np.full(4 * len(table), -1, np.int32)
    for row in range(count):
        found[_slot(found, rows, rows[row, 0], rows[row, 1])] = row
    return found


@compiled
def _longer(rows: NDArray[np.int32], needed: int) -> NDArray[np.int32]:
    """Rows with room for so many."""
    if needed <= len(rows):
        return rows
    found = np.empty((2 * needed, rows.shape[1]), np.int32)
    found[: len(rows)] = rows
    return found


@compiled
def _added(rows: NDArray[np.int32], row: int, a: int, b: int, c: int) -> NDArray[np.int32]:
    """Rows of three with one more, in place `row`."""
    rows = _longer(rows, row + 1)
    rows[row, 0], rows[row, 1], rows[row, 2] = a, b, c
    return rows


@compiled
def _child(tokens: Tokens, node: int, byte: int) -> int:
    if node == 0:
        return int(tokens.roots[byte])
    below, end = node + 1, tokens.skips[node]
    while below < end and tokens.edges[below] < byte:
        below = tokens.skips[below]
    return below if below < end and tokens.edges[below] == byte else 0


@compiled
def _near(net: Arrays, complete: bool, state: int, through: int) -> bool:  # noqa: FBT001 -- compiled code
    """Whether going on through so many bytes is hardly longer than need be: what is one byte long can not have fewer tokens."""
    shortest = net.shortest[state]
    return not complete or through <= shortest + min(_DETOUR, 2 * shortest)


@compiled
def _thinned(net: Arrays, tokens: Tokens, state: int) -> NDArray[np.int32]:
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
        if (target == state and only_blanks) or not _near(net, tokens.complete, state, 1 + net.shortest[target]):
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


@compiled
def _begun(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    net: Arrays, tokens: Tokens, steps: NDArray[np.int32], place: int, state: int, node: int, queue: NDArray[np.int32]
) -> int:
    """Write into the queue how a place goes on; how many rows that are."""
    count = 0
    for k in range(net.jumps_at[state], net.jumps_at[state + 1]):
        if _near(net, tokens.complete, state, net.shortest[net.jumps[k]]):
            count = _pushed(queue, count, _FOLLOW, place, net.jumps[k], node, 0)
    for k in range(len(steps)):
        below = _child(tokens, node, steps[k, 0])
        if below:
            count = _pushed(queue, count, _FOLLOW, place, steps[k, 1], below, 0)
    if node and tokens.ends[node]:
        count = _pushed(queue, count, _FOLLOW, place, state, 0, 1)
    if not node:
        for k in range(net.named_at[state], net.named_at[state + 1]):
            count = _pushed(queue, count, _FOLLOW, place, net.named[k], 0, 1)
    for k in range(net.calls_at[state], net.calls_at[state + 1]):
        start, target = net.calls[k, 0], net.calls[k, 1]
        if _near(net, tokens.complete, state, min(FAR, net.shortest[start] + net.shortest[target])):
            count = _pushed(queue, count, _CALL, place, start, node, target)
    return count


@compiled
def _pushed(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    queue: NDArray[np.int32], count: int, kind: int, place: int, state: int, node: int, value: int
) -> int:
    queue[count, 0], queue[count, 1], queue[count, 2], queue[count, 3], queue[count, 4] = (
        kind,
        place,
        state,
        node,
        value,
    )
    return count + 1


@compiled
def solve(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 -- one loop over tables that grow: compiled code can not share them with a function
    net: Arrays,
    tokens: Tokens,
    known: Known,
    asked: NDArray[np.int32],
    parked: NDArray[np.int32],
    base: int,
    most: int,
) -> tuple[Known, NDArray[np.int32]]:
    """Work out the places asked for and all they depend on.

    Args:
        net: the grammar.
        tokens: the vocabulary.
        known: what is known; what is answered replaces it.
        asked: int32[_, 2], state and node.
        parked: places that waited for a repetition to be unrolled, which it is now.
        base: places below are done.
        most: places after which it is given up.

    Returns:
        What is known then, and the places that wait for a repetition to be unrolled.
    """
    places, exits, waiting, callers, place_table, exit_table, bytes_, bytes_at, counts = known
    queue, offers = np.empty((64, 5), np.int32), np.empty((64, 3), np.int32)
    stuck = np.empty((4, 1), np.int32)
    queued = offered = stuck_count = 0
    heap = [np.int64(0)]
    heap.pop()
    for k in range(len(asked)):
        queue = _longer(queue, queued + 1)
        queued = _pushed(queue, queued, _FOLLOW, -1, asked[k, 0], asked[k, 1], 0)
    for k in range(len(parked)):
        state, node = places[parked[k], STATE], places[parked[k], _NODE]
        queue = _longer(queue, queued + 1)
        queued = _pushed(queue, queued, _CALL, parked[k], net.repeated[state], node, net.following[state])
    while counts[PLACES] <= most:
        if offered:
            offered -= 1
            place, node, sum_ = offers[offered, 0], offers[offered, 1], np.int64(offers[offered, 2])
            if sum_ >= places[place, _WHOLE] + tokens.slack:
                continue
            slot = _slot(exit_table, exits, place, node)
            found = exit_table[slot]
            if found < 0:
                found = counts[_EXIT_COUNT]
                counts[_EXIT_COUNT] += 1
                exits = _longer(exits, found + 1)
                exits[found, 0], exits[found, 1] = place, node
                exits[found, _NEXT_EXIT] = places[place, _EXITS]
                places[place, _EXITS] = found
                exit_table[slot] = found
                if 2 * counts[_EXIT_COUNT] > len(exit_table):
                    exit_table = _wider(exit_table, exits, counts[_EXIT_COUNT])
            elif exits[found, _TOKENS] <= sum_:
                continue
            exits[found, _TOKENS] = sum_
            if node == 0:
                places[place, _WHOLE] = sum_
            heapq.heappush(heap, (sum_ << 32) | np.int64(found))
        elif queued:
            queued -= 1
            kind, place, state, node, value = queue[queued]
            slot = _slot(place_table, places, state, node)
            ahead = place_table[slot]
            if ahead < 0:
                ahead = counts[PLACES]
                counts[PLACES] += 1
                places = _longer(places, ahead + 1)
                places[ahead, STATE], places[ahead, _NODE] = state, node
                places[ahead, _EXITS:_WHOLE], places[ahead, _WHOLE] = -1, FAR
                place_table[slot] = ahead
                if 2 * counts[PLACES] > len(place_table):
                    place_table = _wider(place_table, places, counts[PLACES])
            if place < 0:
                continue
            if ahead >= base and kind == _FOLLOW:
                waiting = _added(waiting, counts[WAITING_COUNT], place, value, places[ahead, _WAITING])
                places[ahead, _WAITING] = counts[WAITING_COUNT]
                counts[WAITING_COUNT] += 1
            elif ahead >= base:
                callers = _added(callers, counts[CALLER_COUNT], place, value, places[ahead, _CALLERS])
                places[ahead, _CALLERS] = counts[CALLER_COUNT]
                counts[CALLER_COUNT] += 1
            found = places[ahead, _EXITS]
            while found >= 0:
                if kind == _FOLLOW:
                    offers = _added(offers, offered, place, exits[found, 1], exits[found, _TOKENS] + value)
                    offered += 1
                else:
                    queue = _longer(queue, queued + 1)
                    queued = _pushed(queue, queued, _FOLLOW, place, value, exits[found, 1], exits[found, _TOKENS])
                found = exits[found, _NEXT_EXIT]
        elif counts[_BEGUN] < counts[PLACES]:
            place = counts[_BEGUN]
            counts[_BEGUN] += 1
            state, node = places[place, STATE], places[place, _NODE]
            if net.repeated[state] >= 0:
                if net.following[state] == UNKNOWN:
                    stuck = _longer(stuck, stuck_count + 1)
                    stuck[stuck_count, 0] = place
                    stuck_count += 1
                else:
                    queued = _pushed(queue, queued, _CALL, place, net.repeated[state], node, net.following[state])
                continue
            if bytes_at[state, 0] < 0:
                steps = _thinned(net, tokens, state)
                row = counts[_BYTES]
                counts[_BYTES] += len(steps)
                bytes_ = _longer(bytes_, row + len(steps))
                bytes_[row : row + len(steps)] = steps
                bytes_at[state, 0], bytes_at[state, 1] = row, row + len(steps)
            steps = bytes_[bytes_at[state, 0] : bytes_at[state, 1]]
            rows = net.jumps_at[state + 1] - net.jumps_at[state] + net.calls_at[state + 1] - net.calls_at[state]
            rows += len(steps) + 1 + net.named_at[state + 1] - net.named_at[state]
            queue = _longer(queue, rows)
            queued = _begun(net, tokens, steps, place, state, node, queue)
            if net.final[state]:
                offers[0, 0], offers[0, 1], offers[0, 2] = place, node, 0
                offered = 1
        elif heap:
            key = heapq.heappop(heap)
            found = np.int64(key & 0xFFFFFFFF)
            sum_ = key >> 32
            if exits[found, _TOKENS] != sum_:
                continue
            place, node = exits[found, 0], exits[found, 1]
            row = places[place, _WAITING]
            while row >= 0:
                offers = _added(offers, offered, waiting[row, 0], node, sum_ + waiting[row, 1])
                offered += 1
                row = waiting[row, _NEXT_WAITING]
            row = places[place, _CALLERS]
            while row >= 0:
                queue = _longer(queue, queued + 1)
                queued = _pushed(queue, queued, _FOLLOW, callers[row, 0], callers[row, 1], node, int(sum_))
                row = callers[row, _NEXT_CALLER]
        else:
            break
    grown = Known(places, exits, waiting, callers, place_table, exit_table, bytes_, bytes_at, counts)
    return grown, stuck[:stuck_count, 0].copy()


@compiled
def read(known: Known, state: int, node: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The nodes of a place's exits, and their tokens."""
    nodes, tokens = np.empty(len(known.exits), np.int32), np.empty(len(known.exits), np.int32)
    found, count = known.places[known.place_table[_slot(known.place_table, known.places, state, node)], _EXITS], 0
    while found >= 0:
        nodes[count], tokens[count] = known.exits[found, 1], known.exits[found, _TOKENS]
        count += 1
        found = known.exits[found, _NEXT_EXIT]
    return nodes[:count].copy(), tokens[:count].copy()
