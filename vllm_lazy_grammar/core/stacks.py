"""Where a text stands in a network: all the stacks of calls it may be in, as one number, and how bytes move it.

A stand is a set of (state, stack of states to return to). Stacks and stands are kept once each, so a stand that comes back (the next character
of a string) is the same number, and a step that was taken once is read from a table from then on.

Invariants:
- A stand depends on the text alone.
- A call that is the last thing its rule does leaves no trace on the stack, so a list written as a rule that calls itself does not grow it.
- Stands and steps never change once they are there; the table only gains.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.shortest import TooMuchError

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.network import Network

UNKNOWN, DEAD = -2, -1
BOTTOM = 0
"""The stack of the grammar's first rule: behind it the text may end."""

_DEPTH = 300
_ITEMS = 2_000
STANDS = 8_000
"""Stands that may be worked out for one grammar."""

_ENTRY_BYTES = 500
"""A stand or a stack with what is kept beside it, about."""

Item = tuple[int, int]
"""(state, stack)"""


class Stacks:
    """Stands in one network.

    Args:
        network: the grammar.

    Attributes:
        items: the items of each stand.
        complete: for each stand, whether the text may end there.
        table: int32[stands or more, 256], the stand behind each byte; `DEAD`, or `UNKNOWN` where it was not asked for yet.
        start: the stand at the grammar's start.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._stacks: dict[Item, int] = {}
        self.frames: list[Item] = [(-1, -1)]
        self._depths = [0]
        self._numbers: dict[frozenset[Item], int] = {}
        self.items: list[tuple[Item, ...]] = []
        self.complete: list[bool] = []
        self.table = np.full((64, 256), UNKNOWN, np.int32)
        self._behind: dict[frozenset[Item], int] = {}
        self.start = self._stand([(network.start, BOTTOM)])

    @property
    def nbytes(self) -> int:
        """Memory held, about."""
        return self.table.nbytes + (len(self.items) + len(self._behind) + len(self.frames)) * _ENTRY_BYTES

    def _push(self, state: int, stack: int) -> int:
        known = self._stacks.get((state, stack))
        if known is None:
            if self._depths[stack] >= _DEPTH:
                raise TooMuchError
            known = self._stacks[state, stack] = len(self.frames)
            self.frames.append((state, stack))
            self._depths.append(self._depths[stack] + 1)
        return known

    def _stand(self, moved: list[Item]) -> int:
        """The number of the stand with these items and all they lead to without a byte; `DEAD` where nothing can follow."""
        found, complete = self._closed(moved)
        if not found and not complete:
            return DEAD
        kept = frozenset((*found, (-1, BOTTOM)) if complete else found)
        number = self._numbers.get(kept)
        if number is None:
            if len(self.items) >= STANDS:
                raise TooMuchError
            number = self._numbers[kept] = len(self.items)
            self.items.append(tuple(sorted(found)))
            self.complete.append(complete)
            if number == len(self.table):
                self.table = np.concatenate((self.table, np.full_like(self.table, UNKNOWN)))
        return number

    def _closed(self, moved: list[Item]) -> tuple[list[Item], bool]:
        states, found, complete = self._network.states, [], False
        seen, waiting = set(moved), list(moved)
        while waiting:
            number, stack = waiting.pop()
            state = states[number]
            if state.spans or state.named:
                found.append((number, stack))
            if state.final and stack == BOTTOM:
                complete = True
            for item in self._silently(number, stack):
                if item not in seen:
                    seen.add(item)
                    waiting.append(item)
            if len(seen) > _ITEMS:
                raise TooMuchError
        return found, complete

    def _silently(self, number: int, stack: int) -> list[Item]:
        """The items one step further that no byte separates from this one."""
        states = self._network.states
        state = states[number]
        items = [(target, stack) for target in state.jumps]
        for start, target in self._network.calls(number):
            items.append((start, stack if states[target].is_tail else self._push(target, stack)))
        if state.final and stack != BOTTOM:
            items.append(self.frames[stack])
        return items

    def step(self, stand: int, byte: int) -> int:
        """The stand behind one byte more; `DEAD` where the grammar does not take it."""
        if stand < 0:
            return DEAD
        after = int(self.table[stand, byte])
        if after == UNKNOWN:
            after = self._step(stand, byte)
        return after

    def _step(self, stand: int, byte: int) -> int:
        """Fill a stand's whole row, as bytes come in few kinds; what would take too much is left out of it, the byte asked for excepted."""
        after = np.full(256, DEAD, np.int32)
        for low, high, moved in self._moves(stand):
            try:
                after[low:high] = self._moved(moved)
            except TooMuchError:
                if low <= byte < high:
                    raise
                after[low:high] = UNKNOWN
        self.table[stand] = after
        return int(after[byte])

    def _moves(self, stand: int) -> list[tuple[int, int, frozenset[Item]]]:
        """The items that bytes from a first one to one before a last one lead to, without what they lead to silently."""
        states = self._network.states
        begins: dict[int, list[Item]] = defaultdict(list)
        ends: dict[int, list[Item]] = defaultdict(list)
        for number, stack in self.items[stand]:
            for low, high, target in states[number].spans:
                begins[low].append((target, stack))
                ends[high + 1].append((target, stack))
        places = sorted({*begins, *ends})
        found, here = [], Counter[Item]()
        for place, following in pairwise(places):
            here.subtract(ends[place])
            here.update(begins[place])
            moved = frozenset(item for item, count in here.items() if count > 0)
            if moved:
                found.append((place, following, moved))
        return found

    def _moved(self, moved: frozenset[Item]) -> int:
        known = self._behind.get(moved)
        if known is None:
            known = self._behind[moved] = self._stand(sorted(moved))
        return known

    def steps(self, stand: int, data: bytes) -> int:
        """The stand behind some bytes."""
        for byte in data:
            stand = self.step(stand, byte)
        return stand

    def by_name(self, stand: int, token: int) -> int:
        """The stand behind a token that the grammar takes by its id; `DEAD` where it does not."""
        states = self._network.states
        moved = {
            (target, stack)
            for number, stack in (self.items[stand] if stand >= 0 else ())
            for tokens, target in states[number].named
            if token in tokens
        }
        return self._stand(sorted(moved)) if moved else DEAD
