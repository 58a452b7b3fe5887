"""A position in a grammar of calls that is chosen by its openings (`dispatch`): stretches in the table and in parts, one behind another.

Invariants:
- A step is a token or bytes that were accepted as one, through however many stretches they went; taking back counts them so.
- Only `fill` and a token that goes into a part wait for its compile.
- A matcher belongs to one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from vllm_lazy_grammar.core.byte_trie import DEAD
from vllm_lazy_grammar.core.crossing import MARK
from vllm_lazy_grammar.core.matcher import CERTAIN_LIMIT
from vllm_lazy_grammar.core.rows import IdSet, is_allowed

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.dispatch import DispatchGrammar, Part
    from vllm_lazy_grammar.core.matcher import Matcher, Row

_FOIL = b"\x02"
"""Where a part takes this as well as the mark, both are free text."""


class Frame:
    """A stretch of a text: in the table, or in a part.

    Args:
        begin: the matcher's step after which it began.
        base: in a part: the matcher's step at which the part's own steps begin to count.
        states: in the table: the state after each step from `begin` on; None in a part.
        number: calls begun until here.
        part: which one; None in the table.
    """

    __slots__ = ("base", "begin", "inner", "number", "part", "states")

    def __init__(self, begin: int, states: list[int] | None, number: int, part: Part | None = None) -> None:
        self.begin = self.base = begin
        self.states, self.number, self.part = states, number, part
        self.inner: Matcher | None = None

    def fork(self) -> Frame:
        """A copy with a matcher of its own."""
        states = None if self.states is None else [*self.states]
        twin = Frame(self.begin, states, self.number, self.part)
        twin.base = self.base
        twin.inner = None if self.inner is None else self.inner.fork()
        return twin

    @property
    def steps(self) -> int:
        """The matcher's steps at its end."""
        if self.states is not None:
            return self.begin + len(self.states) - 1
        return self.base + (0 if self.inner is None else self.inner.steps)


_NONE: frozenset[int] = frozenset()


class DispatchMatcher:
    """A position in a `DispatchGrammar`; implements `Matcher`."""

    __slots__ = ("_frames", "_grammar", "_inner", "_top", "_watched")

    def __init__(self, grammar: DispatchGrammar, frames: list[Frame]) -> None:
        self._grammar, self._frames = grammar, frames
        self._look()

    def _look(self) -> None:
        """Note what the last frame is: almost every call is for its part."""
        self._top = top = self._frames[-1]
        self._inner = top.inner
        goes_on = top.part is not None and top.part.goes_on
        self._watched = self._grammar.crossing.watched if goes_on else _NONE

    @property
    def steps(self) -> int:
        """Steps accepted and not rolled back."""
        return self._top.steps

    # -- moving ------------------------------------------------------------------------------------------------------

    def accept(self, token: int) -> bool:
        """Advance by one whole token; waits for a part's compile where the token goes into one that is not there."""
        inner = self._inner
        if inner is not None and token not in self._watched:
            return inner.accept(token)
        vocabulary = self._grammar.vocabulary
        data = vocabulary.piece(token)
        if not data or token in vocabulary.special_ids:
            return False
        if self._top.states is None and token not in self._watched:
            return self._opened(self._top).accept(token)
        return self._feed(data)

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes, as one step; empty bytes are no step."""
        if not data:
            return True
        inner = self._inner
        return inner.accept_bytes(data) if inner is not None and not self._watched else self._feed(data)

    def would_wait(self, token: int) -> bool:
        """Whether accepting a token would wait for a compile."""
        if self._inner is not None:
            return False
        top, grammar = self._top, self._grammar
        if top.states is None:
            return top.part is not None and not grammar.is_there(top.part.key)
        state, data = top.states[-1], grammar.vocabulary.piece(token)
        for place, byte in enumerate(data):
            state = int(grammar.openings.table[state, byte])
            if state == DEAD:
                return False
            call = grammar.openings.ends[state]
            if call >= 0:
                return place + 1 < len(data) and not grammar.is_there(grammar.part(call, top.number + 1).key)
        return False

    def _feed(self, data: bytes) -> bool:
        """Advance by bytes through as many frames as they take; one step."""
        before = self.steps
        rest: bytes | None = None
        try:
            rest = self._through(data, before + 1)
        finally:  # a part's compile may have failed
            if rest is None:
                self._undo_to(before)
            self._look()
        return rest is not None

    def _through(self, data: bytes, step: int) -> bytes | None:
        """Read bytes from frame to frame; None where they are refused."""
        rest: bytes | None = data
        while rest:
            top = self._frames[-1]
            if top.states is not None:
                rest = self._feed_table(top, top.states, rest, step)
            else:
                rest = self._feed_part(top, rest, step)
        return rest

    def _feed_table(self, top: Frame, states: list[int], data: bytes, step: int) -> bytes | None:
        """Read bytes in the table: what is left behind an opening's end; None where they are refused."""
        grammar = self._grammar
        openings, state = grammar.openings, states[-1]
        for place, byte in enumerate(data):
            state = int(openings.table[state, byte])
            if state == DEAD:
                return None
            if openings.ends[state] >= 0:
                part = grammar.part(openings.ends[state], top.number + 1)
                self._frames.append(Frame(step, None, top.number + 1, part))
                grammar.want(part.key)
                return data[place + 1 :]
        if top.begin == step:  # it began in the middle of this step
            states[-1] = state
        else:
            states.append(state)
        if openings.only[state] >= 0:
            grammar.want(grammar.part(openings.only[state], top.number + 1).key)
        return b""

    def _feed_part(self, top: Frame, data: bytes, step: int) -> bytes | None:
        """Read bytes in a part: what is left behind the text before another call, where the table goes on; None where they are refused."""
        inner = self._opened(top)
        if top.begin == step:
            top.base = step - 1  # its first step is in the middle of this one
        if top.part is not None and top.part.goes_on:
            for size in self._grammar.crossing.cuts(data):
                if inner.accept_bytes(data[:size]):
                    if _is_marked(inner):
                        self._frames.append(Frame(step, [self._grammar.openings.behind], top.number))
                        return data[size:]
                    inner.rollback(1)
        return b"" if inner.accept_bytes(data) else None

    def _opened(self, frame: Frame) -> Matcher:
        """A part's own matcher; waits for its compile."""
        if frame.inner is None:
            assert frame.part is not None  # noqa: S101 -- a frame without one is in the table
            frame.inner = self._grammar.join(frame.part.key).matcher()
            if frame is self._top:
                self._inner = frame.inner
        return frame.inner

    def rollback(self, steps: int) -> None:
        """Take back the last steps; ValueError where there are fewer."""
        if not 0 <= steps <= self.steps:
            raise ValueError(f"can not take back {steps} steps of {self.steps}")
        if self._inner is not None and self._inner.steps >= steps and self._top.begin <= self.steps - steps:
            self._inner.rollback(steps)
        elif steps:
            self._undo_to(self.steps - steps)
            self._look()

    def _undo_to(self, step: int) -> None:
        while self._frames[-1].begin > step:
            self._frames.pop()
        top = self._frames[-1]
        if top.states is not None:
            del top.states[step - top.begin + 1 :]
        elif top.inner is not None:
            top.inner.rollback(top.steps - step)

    def fork(self) -> Self:
        """An independent matcher at the same position, history included."""
        return type(self)(self._grammar, [frame.fork() for frame in self._frames])

    # -- looking -----------------------------------------------------------------------------------------------------

    def fill(self, row: Row) -> bool:
        """Write the mask of the next token; waits for a part's compile where a token may go into one. True: something is always masked."""
        top = self._top
        if top.states is not None:
            np.copyto(row, self._grammar.row(top.states[-1], top.number))
            return True
        inner = self._inner or self._opened(top)
        masks = inner.fill(row)
        if not self._watched:
            return masks
        self._cross(inner, row)
        return True

    def _cross(self, inner: Matcher, row: Row) -> None:
        """Set the tokens that go over the text before another call."""
        crossing, size = self._grammar.crossing, self._grammar.vocabulary.size
        for end, token, beyond in crossing.ways:
            if (token is None or is_allowed(row, token, size)) and inner.accept_bytes(end):
                if _is_marked(inner):
                    beyond.allow(row)
                inner.rollback(1)
        for token in crossing.others:
            single = IdSet([token], size)
            if self.accept(token):
                self.rollback(1)
                single.allow(row)
            else:
                single.mask(row)

    def is_completed(self) -> bool:
        """Whether what was accepted so far is a complete sentence; no part takes the empty text, so none is waited for."""
        return self._inner is not None and self._inner.is_completed()

    def certain(self, limit: int = CERTAIN_LIMIT) -> bytes:
        """The bytes that must come next, at most `limit` of them; they end where a part's compile would have to be waited for."""
        if self._inner is not None and not self._watched:
            return self._inner.certain(limit)
        found, begin = b"", self.steps
        while len(found) < limit and not self.is_completed():
            more = self._certain_here(limit - len(found))
            if not more or not self.accept_bytes(more):
                break
            found += more
        self.rollback(self.steps - begin)
        return found

    def _certain_here(self, limit: int) -> bytes:
        """The certain bytes as far as the last frame goes."""
        top = self._top
        if top.states is not None:
            return self._certain_in_table(top.states[-1], limit)
        if top.part is None or not self._grammar.is_there(top.part.key):
            return b""
        return (
            self._opened(top).certain(limit).partition(MARK)[0] if self._watched else self._opened(top).certain(limit)
        )

    def _certain_in_table(self, state: int, limit: int) -> bytes:
        found, openings = bytearray(), self._grammar.openings
        while len(found) < limit and openings.ends[state] < 0:
            ways = np.flatnonzero(openings.table[state] >= 0)
            if len(ways) != 1:
                break
            found.append(int(ways[0]))
            state = int(openings.table[state, ways[0]])
        return bytes(found)

    def next_bytes(self, row: Row) -> bytes:
        """Each byte that may come next, ascending; empty where a part's compile would have to be waited for. `row` is overwritten."""
        top = self._top
        if top.states is not None:
            return bytes(np.flatnonzero(self._grammar.openings.table[top.states[-1]] >= 0).tolist())
        if self._inner is None and (top.part is None or not self._grammar.is_there(top.part.key)):
            return b""
        return self._opened(top).next_bytes(row)


def _is_marked(inner: Matcher) -> bool:
    """Whether a part takes the mark here, and not as free text."""
    if not inner.accept_bytes(MARK):
        return False
    inner.rollback(1)
    if not inner.accept_bytes(_FOIL):
        return True
    inner.rollback(1)
    return False
