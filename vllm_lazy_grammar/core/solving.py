"""The fixed point behind `shortest`, in compiled code: what a place can do is told to those that wait for it, the smallest numbers first.

Invariants:
- A place is told of once for each of its numbers; numbers of a place and node only fall.
- Tables grow by doubling; a row once written keeps its place.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_lazy_grammar.core.compiled import compiled
from vllm_lazy_grammar.core.flat import UNKNOWN, Arrays
from vllm_lazy_grammar.core.network import FAR
from vllm_lazy_grammar.core.thinning import Tokens, child, near, thinned

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATE, _NODE, _EXITS, _WAITING, _CALLERS, _WHOLE = range(6)  # columns of places
_TOKENS = _NEXT_WAITING = _NEXT_CALLER = (
    2  # columns of exits, of those that wait and of callers, behind (place, node / more / target)
)
_NEXT_EXIT = 3
_FOLLOW, _CALL = 0, 1


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
    for k in range(len(rows)):  # a slice that is assigned takes numba 16 seconds to compile: its error message
        for column in range(rows.shape[1]):
            found[k, column] = rows[k, column]
    return found


@compiled
def _added(rows: NDArray[np.int32], row: int, a: int, b: int, c: int) -> NDArray[np.int32]:
    """Rows of three with one more, in place `row`."""
    rows = _longer(rows, row + 1)
    rows[row, 0], rows[row, 1], rows[row, 2] = a, b, c
    return rows


@compiled
def _begun(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    net: Arrays, tokens: Tokens, steps: NDArray[np.int32], place: int, state: int, node: int, queue: NDArray[np.int32]
) -> tuple[NDArray[np.int32], int]:
    """The queue, which was empty, with how a place goes on; how many rows that are."""
    rows = net.jumps_at[state + 1] - net.jumps_at[state] + net.calls_at[state + 1] - net.calls_at[state]
    queue = _longer(queue, rows + len(steps) + 1 + net.named_at[state + 1] - net.named_at[state])
    count = 0
    for k in range(net.jumps_at[state], net.jumps_at[state + 1]):
        if near(net, tokens.complete, state, net.shortest[net.jumps[k]]):
            count = _pushed(queue, count, _FOLLOW, place, net.jumps[k], node, 0)
    for k in range(len(steps)):
        below = child(tokens, node, steps[k, 0])
        if below:
            count = _pushed(queue, count, _FOLLOW, place, steps[k, 1], below, 0)
    if node and tokens.ends[node]:
        count = _pushed(queue, count, _FOLLOW, place, state, 0, 1)
    if not node:
        for k in range(net.named_at[state], net.named_at[state + 1]):
            count = _pushed(queue, count, _FOLLOW, place, net.named[k], 0, 1)
    for k in range(net.calls_at[state], net.calls_at[state + 1]):
        start, target = net.calls[k, 0], net.calls[k, 1]
        if near(net, tokens.complete, state, min(FAR, net.shortest[start] + net.shortest[target])):
            count = _pushed(queue, count, _CALL, place, start, node, target)
    return queue, count


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
def _numbered(
    places: NDArray[np.int32], table: NDArray[np.int32], counts: NDArray[np.int64], state: int, node: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """The places and their table, and the number of one of them, which is new where it had none."""
    slot = _slot(table, places, state, node)
    place = int(table[slot])
    if place >= 0:
        return places, table, place
    place = int(counts[PLACES])
    counts[PLACES] += 1
    places = _longer(places, place + 1)
    places[place, STATE], places[place, _NODE] = state, node
    places[place, _EXITS:_WHOLE], places[place, _WHOLE] = -1, FAR
    table[slot] = place
    if 2 * counts[PLACES] > len(table):
        table = _wider(table, places, counts[PLACES])
    return places, table, place


@compiled
def _taken(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    offer: NDArray[np.int32],
    slack: int,
    places: NDArray[np.int32],
    exits: NDArray[np.int32],
    table: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """The exits and their table with an offer (place, node, tokens), and its number there; -1 where one as good is known."""
    place, node, sum_ = offer[0], offer[1], offer[2]
    if sum_ >= places[place, _WHOLE] + slack:
        return exits, table, -1
    slot = _slot(table, exits, place, node)
    found = int(table[slot])
    if found >= 0 and exits[found, _TOKENS] <= sum_:
        return exits, table, -1
    if found < 0:
        found = int(counts[_EXIT_COUNT])
        counts[_EXIT_COUNT] += 1
        exits = _longer(exits, found + 1)
        exits[found, 0], exits[found, 1] = place, node
        exits[found, _NEXT_EXIT] = places[place, _EXITS]
        places[place, _EXITS] = found
        table[slot] = found
        if 2 * counts[_EXIT_COUNT] > len(table):
            table = _wider(table, exits, counts[_EXIT_COUNT])
    exits[found, _TOKENS] = sum_
    if node == 0:
        places[place, _WHOLE] = sum_
    return exits, table, found


@compiled
def _linked(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    rows: NDArray[np.int32],
    counts: NDArray[np.int64],
    kind: int,
    place: int,
    value: int,
    places: NDArray[np.int32],
    ahead: int,
) -> NDArray[np.int32]:
    """Rows of those that wait, or call, with (place, value) in front of the list of the place ahead."""
    column, count = (_WAITING, WAITING_COUNT) if kind == _FOLLOW else (_CALLERS, CALLER_COUNT)
    row = counts[count]
    counts[count] += 1
    rows = _added(rows, row, place, value, places[ahead, column])
    places[ahead, column] = row
    return rows


@compiled
def _offered(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    offers: NDArray[np.int32], count: int, exits: NDArray[np.int32], first: int, place: int, more: int
) -> tuple[NDArray[np.int32], int]:
    """The offers with each exit of a list: the place that follows it has it too, for `more` tokens more."""
    while first >= 0:
        offers = _added(offers, count, place, exits[first, 1], exits[first, _TOKENS] + more)
        count += 1
        first = exits[first, _NEXT_EXIT]
    return offers, count


@compiled
def _returned(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    queue: NDArray[np.int32], count: int, exits: NDArray[np.int32], first: int, place: int, behind: int
) -> tuple[NDArray[np.int32], int]:
    """The queue with each exit of a list: the place that calls it goes on at the state behind the call."""
    while first >= 0:
        queue = _longer(queue, count + 1)
        count = _pushed(queue, count, _FOLLOW, place, behind, exits[first, 1], exits[first, _TOKENS])
        first = exits[first, _NEXT_EXIT]
    return queue, count


@compiled
def _told(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    offers: NDArray[np.int32], count: int, waiting: NDArray[np.int32], first: int, node: int, sum_: int
) -> tuple[NDArray[np.int32], int]:
    """The offers with what an exit at a node is to each of those that wait."""
    while first >= 0:
        offers = _added(offers, count, waiting[first, 0], node, sum_ + waiting[first, 1])
        count += 1
        first = waiting[first, _NEXT_WAITING]
    return offers, count


@compiled
def _told_callers(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    queue: NDArray[np.int32], count: int, callers: NDArray[np.int32], first: int, node: int, sum_: int
) -> tuple[NDArray[np.int32], int]:
    """The queue with where each of the callers goes on behind an exit at a node."""
    while first >= 0:
        queue = _longer(queue, count + 1)
        count = _pushed(queue, count, _FOLLOW, callers[first, 0], callers[first, 1], node, sum_)
        first = callers[first, _NEXT_CALLER]
    return queue, count


@compiled
def _asked(
    net: Arrays, places: NDArray[np.int32], asked: NDArray[np.int32], parked: NDArray[np.int32]
) -> tuple[NDArray[np.int32], int]:
    """The queue to begin with."""
    queue, queued = np.empty((64 + len(asked) + len(parked), 5), np.int32), 0
    for k in range(len(asked)):
        queued = _pushed(queue, queued, _FOLLOW, -1, asked[k, 0], asked[k, 1], 0)
    for k in range(len(parked)):
        state, node = places[parked[k], STATE], places[parked[k], _NODE]
        queued = _pushed(queue, queued, _CALL, parked[k], net.repeated[state], node, net.following[state])
    return queue, queued


@compiled
def _with_steps(  # noqa: PLR0913, PLR0917 -- compiled code takes arrays, not objects
    net: Arrays,
    tokens: Tokens,
    bytes_: NDArray[np.int32],
    bytes_at: NDArray[np.int32],
    counts: NDArray[np.int64],
    state: int,
) -> NDArray[np.int32]:
    """The steps of all states, those of this one too."""
    if bytes_at[state, 0] >= 0:
        return bytes_
    steps, row = thinned(net, tokens, state), counts[_BYTES]
    counts[_BYTES] += len(steps)
    bytes_ = _longer(bytes_, row + len(steps))
    for k in range(len(steps)):
        bytes_[row + k, 0], bytes_[row + k, 1] = steps[k, 0], steps[k, 1]
    bytes_at[state, 0], bytes_at[state, 1] = row, row + len(steps)
    return bytes_


@compiled
def solve(  # noqa: C901, PLR0912, PLR0913, PLR0917 -- one loop over tables that grow: compiled code can not share them with a function
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
    queue, queued = _asked(net, places, asked, parked)
    offers, offered = np.empty((64, 3), np.int32), 0
    heap, stuck = [np.int64(0)], [np.int64(0)]  # a list's type in compiled code is that of what was in it
    heap.clear()
    stuck.clear()
    while counts[PLACES] <= most:
        if offered:
            offered -= 1
            exits, exit_table, found = _taken(offers[offered], tokens.slack, places, exits, exit_table, counts)
            if found >= 0:
                heapq.heappush(heap, (np.int64(exits[found, _TOKENS]) << 32) | np.int64(found))
        elif queued:
            queued -= 1
            kind, place, state, node, value = queue[queued]
            places, place_table, ahead = _numbered(places, place_table, counts, state, node)
            if place >= 0 and kind == _FOLLOW:
                if ahead >= base:
                    waiting = _linked(waiting, counts, kind, place, value, places, ahead)
                offers, offered = _offered(offers, offered, exits, places[ahead, _EXITS], place, value)
            elif place >= 0:
                if ahead >= base:
                    callers = _linked(callers, counts, kind, place, value, places, ahead)
                queue, queued = _returned(queue, queued, exits, places[ahead, _EXITS], place, value)
        elif counts[_BEGUN] < counts[PLACES]:
            place = counts[_BEGUN]
            counts[_BEGUN] += 1
            state, node = places[place, STATE], places[place, _NODE]
            if net.repeated[state] >= 0 and net.following[state] == UNKNOWN:
                stuck.append(place)
            elif net.repeated[state] >= 0:
                queued = _pushed(queue, queued, _CALL, place, net.repeated[state], node, net.following[state])
            else:
                bytes_ = _with_steps(net, tokens, bytes_, bytes_at, counts, state)
                steps = bytes_[bytes_at[state, 0] : bytes_at[state, 1]]
                queue, queued = _begun(net, tokens, steps, place, state, node, queue)
                if net.final[state]:
                    offers[0, 0], offers[0, 1], offers[0, 2] = place, node, 0
                    offered = 1
        elif heap:
            key = int(heapq.heappop(heap))
            found, sum_ = key & 0xFFFFFFFF, key >> 32
            if exits[found, _TOKENS] == sum_:
                place, node = exits[found, 0], exits[found, 1]
                offers, offered = _told(offers, offered, waiting, places[place, _WAITING], node, sum_)
                queue, queued = _told_callers(queue, queued, callers, places[place, _CALLERS], node, sum_)
        else:
            break
    grown = Known(places, exits, waiting, callers, place_table, exit_table, bytes_, bytes_at, counts)
    return grown, np.array(stuck, np.int32)


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
