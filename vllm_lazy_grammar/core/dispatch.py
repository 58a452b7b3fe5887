r"""A grammar of calls that is chosen by its openings: a table of bytes up to where a call's arguments begin, then that call's own grammar.

What stands behind an opening is a *part*: the rest of the call with what closes the block, compiled alone and shared by all sets of tools. Where
another call may follow in the same block, the part goes on instead with the text before it and a mark, `MARK`, which nobody samples: where the
mark may come, the table takes over.

Invariants:
- The language is that of the one piece: a token that goes over an opening's end, or over the text before another call, is asked of the part and
  of the table, byte by byte.
- A part is compiled once, however many grammars have it; it is held as long as the grammar is, unless nobody holds that and it is not there yet.
- Only a row, and a token that goes into a part, wait for its compile, and then for that one alone.
- A grammar is shared between threads; a matcher belongs to one at a time.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from vllm_lazy_grammar.core.byte_trie import DEAD
from vllm_lazy_grammar.core.matcher import CERTAIN_LIMIT
from vllm_lazy_grammar.core.network import composed
from vllm_lazy_grammar.core.openings import AmbiguousError, Opening, Openings
from vllm_lazy_grammar.core.prewarm import on_worker
from vllm_lazy_grammar.core.rows import IdSet, allowed_ids, is_allowed, zeros

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.compiles import Compile, GrammarStore
    from vllm_lazy_grammar.core.matcher import CompiledGrammar, GrammarKey, Matcher, Row
    from vllm_lazy_grammar.core.network import Network
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

MARK = b"\x01"
"""Behind the text before another call."""

_FOIL = b"\x02"
"""Where a part takes this as well as the mark, both are free text."""

_ROWS = 64
"""Rows of the table that are kept, for each grammar."""


@dataclass(frozen=True, slots=True)
class Call:
    """One of the calls.

    Args:
        openings: what may open it.
        last: the key of what stands behind an opening, up to the end of the grammar; it does not take the empty text.
        more: the same where another call may follow: it may end in one of the plan's `again` and the mark too. None where none may.
    """

    openings: tuple[Opening, ...]
    last: GrammarKey
    more: GrammarKey | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a grammar is taken apart.

    Args:
        opens: texts of which one comes first; at least one, which may be empty.
        calls: at least one.
        again: the texts before another call, none empty: what separates calls, and the beginning that all openings share.
        shared: that beginning.
        most: calls that there may be; None: any number.
    """

    opens: tuple[bytes, ...]
    calls: tuple[Call, ...]
    again: tuple[bytes, ...] = ()
    shared: bytes = b""
    most: int | None = 1


class Part(NamedTuple):
    """What stands behind an opening.

    Args:
        key: its grammar.
        goes_on: whether another call may follow.
    """

    key: GrammarKey
    goes_on: bool


@runtime_checkable
class _HasNetwork(Protocol):
    def network(self) -> Network | None: ...


class Dispatcher:
    """Makes such grammars.

    Args:
        trie: the vocabulary's pieces.
        plan_of: how a key is taken apart; None where it is compiled in one piece.
        on_wait: told a part's key, and the seconds that a row or a token waited for it.
    """

    def __init__(
        self,
        trie: ByteTrie,
        plan_of: Callable[[GrammarKey], Plan | None],
        on_wait: Callable[[GrammarKey, float], None] | None = None,
    ) -> None:
        self.trie = trie
        self.on_wait = on_wait
        self._plan_of = plan_of

    def grammar(self, key: GrammarKey, store: GrammarStore) -> DispatchGrammar | None:
        """The grammar of a key, without its parts; None where it has to be compiled in one piece."""
        plan = self._plan_of(key)
        if plan is None:
            return None
        try:
            openings = Openings(plan.opens, [call.openings for call in plan.calls], plan.again, plan.shared)
        except AmbiguousError:
            return None
        return DispatchGrammar(key, plan, openings, self, store)


class DispatchGrammar:
    """Implements `CompiledGrammar`.

    Args:
        key: what it is made of.
        plan: how that is taken apart.
        openings: the table.
        dispatcher: the vocabulary, and who is told of waits.
        store: compiles the parts.
    """

    def __init__(
        self, key: GrammarKey, plan: Plan, openings: Openings, dispatcher: Dispatcher, store: GrammarStore
    ) -> None:
        self.key, self.plan, self.openings = key, plan, openings
        self.origin = "xgrammar, tool by tool"  # structural tags are its
        self.trie, self.vocabulary = dispatcher.trie, dispatcher.trie.vocabulary
        self.crossing = Crossing(openings, plan.again, self.trie)
        self._store, self._on_wait = store, dispatcher.on_wait
        self._lock = threading.Lock()
        self._parts: dict[GrammarKey, Compile] = {}
        self._wanted: set[GrammarKey] = set()
        self._rows: dict[tuple[int, bool], Row] = {}
        self._is_held = False
        sizes = sorted(((len(call.last.source), place) for place, call in enumerate(plan.calls)), reverse=True)
        self._ahead = [self.part(place, 1).key for _, place in sizes]
        finalizer = weakref.finalize(self, _let_go, self._parts)
        finalizer.atexit = False

    @property
    def nbytes(self) -> int:
        """Memory it holds, in bytes: the table, its rows and the parts that are there."""
        with self._lock:
            parts = list(self._parts.values())
        there = (part.future for part in parts if part.ready)
        held = sum(f.result().nbytes for f in there if not f.cancelled() and f.exception() is None)
        return self.openings.nbytes + held + 4 * self.vocabulary.row_words * len(self._rows)

    def matcher(self) -> DispatchMatcher:
        """A new matcher at the start."""
        return DispatchMatcher(self, [_Frame(0, [self.openings.start], 0)])

    # -- parts -------------------------------------------------------------------------------------------------------

    def part(self, call: int, number: int) -> Part:
        """What stands behind the opening of a call that is the `number`-th one."""
        found = self.plan.calls[call]
        return Part(found.last, False) if found.more is None or self._is_last(number) else Part(found.more, True)  # noqa: FBT003 -- a field by its place

    def _is_last(self, number: int) -> bool:
        return self.plan.most is not None and number >= self.plan.most

    def _compile(self, key: GrammarKey) -> Compile:
        with self._lock:
            known = self._parts.get(key)
        if known is not None:
            return known
        fresh = self._store.get_part(key)
        with self._lock:
            kept = self._parts.setdefault(key, fresh)
        if kept is not fresh:
            fresh.release()
        return kept

    def want(self, key: GrammarKey) -> None:
        """Have a part compiled before all others: its opening is the only one left."""
        if key not in self._wanted:
            self._wanted.add(key)
            self._store.hasten(self._compile(key))

    def is_there(self, key: GrammarKey) -> bool:
        """Whether a part can be used without waiting."""
        return self._compile(key).ready

    def join(self, key: GrammarKey) -> CompiledGrammar:
        """A part, waited for. Raises what its compile raised."""
        part = self._compile(key)
        if part.ready:
            return part.result()
        begin = time.perf_counter()
        try:
            return part.join()
        finally:
            if self._on_wait is not None and not on_worker():
                self._on_wait(key, time.perf_counter() - begin)

    def resume(self) -> None:
        """Somebody holds it: compile its parts ahead, one at a time, the longest first: a short one is there soon once it is wanted."""
        self._is_held = True
        self.go_on()

    def pause(self) -> None:
        """Nobody holds it: give back what is not there yet."""
        self._is_held = False
        with self._lock:
            missing = [key for key, part in self._parts.items() if not part.ready]
            parts = [self._parts.pop(key) for key in missing]
            self._wanted.difference_update(missing)
        for part in parts:
            part.release()

    def go_on(self) -> None:
        """Compile the next part ahead, while somebody holds the grammar."""
        while self._is_held and self._store.works_ahead:
            key = next((key for key in self._ahead if key not in self._parts), None)
            part = None if key is None else self._compile(key)
            if part is None:
                return
            if not part.ready:
                part.future.add_done_callback(partial(_resumed, weakref.ref(self)))  # a future keeps what it called
                return

    # -- what a text may be ------------------------------------------------------------------------------------------

    def network(self) -> Network | None:
        """Its states, put together from those of its parts, which are compiled here where nobody has begun; None where one can not be read.

        The number of calls is not counted: the way to another call is never shorter than the end. A call whose part can not be
        compiled is left out.
        """
        found: list[Network | None] = []
        for call in range(len(self.plan.calls)):
            part = self._compile(self.part(call, 1).key)
            part.finish()
            if part.future.cancelled() or part.future.exception() is not None:
                found.append(None)
                continue
            grammar = part.result()
            network = grammar.network() if isinstance(grammar, _HasNetwork) else None
            if network is None:
                return None
            found.append(network)
        openings = self.openings
        return composed(
            openings.states(), openings.ends, found, mark=MARK[0], behind=openings.behind, start=openings.start
        )

    def row(self, state: int, number: int) -> Row:
        """The tokens that may come at a state of the table, `number` calls having come before; shared, not to be changed.

        Waits for the parts that a token may reach into.
        """
        place = (state, self._is_last(number + 1))
        known = self._rows.get(place)
        if known is None:
            known = self._make_row(state, number)
            if len(self._rows) >= _ROWS:
                self._rows.clear()
            self._rows[place] = known
        return known

    def _make_row(self, state: int, number: int) -> Row:
        row, openings = zeros(self.vocabulary.row_words), self.openings
        self.trie.survivors(openings.table, state, row)
        for node, end in self.trie.entered(openings.table, openings.is_end, state).tolist():
            call = openings.ends[end]
            matcher = DispatchMatcher(self, [_Frame(0, None, number + 1, self.part(call, number + 1))])
            self.trie.below(node, matcher, row)
        return row


def _resumed(held: weakref.ref[DispatchGrammar], _: object) -> None:
    grammar = held()
    if grammar is not None:
        grammar.go_on()


def _let_go(parts: dict[GrammarKey, Compile]) -> None:
    for part in parts.values():
        part.release()


class Crossing:
    """The tokens that may go over the text before another call; worked out once for a grammar.

    Args:
        openings: the table.
        again: the texts.
        trie: the vocabulary's pieces.

    Attributes:
        watched: tokens with which such a text may end, in or at their end.
        ways: ends of such a text, with the token that is just this end where there is one, and the tokens that go on behind it in the table.
        others: tokens that have to be tried: those that hold a whole such text and more, or an end of it, an opening and more.
    """

    def __init__(self, openings: Openings, again: Sequence[bytes], trie: ByteTrie) -> None:
        vocabulary = trie.vocabulary
        self._again = again
        self.ways: list[tuple[bytes, int | None, IdSet]] = []
        watched: set[int] = set()
        others = {token for text in again for token in _holding(vocabulary, text) if not _ends(vocabulary, token, text)}
        watched.update(token for text in again for token in _holding(vocabulary, text))
        begun: set[bytes] = set()
        for text, states in zip(again, openings.again, strict=True):
            for place, state in enumerate(states):
                end = text[place:]
                if end in begun:
                    continue
                begun.add(end)
                beyond = self._beyond(openings, trie, end, state, watched)
                if beyond:
                    self.ways.append((end, vocabulary.text_id(end), IdSet(beyond, vocabulary.size)))
                others.update(self._far(openings, trie, state))
                others.update(_marked(vocabulary, end + MARK))
        self.watched, self.others = frozenset(watched | others), sorted(others)

    @staticmethod
    def _beyond(openings: Openings, trie: ByteTrie, end: bytes, state: int, watched: set[int]) -> list[int]:
        row = zeros(trie.row_words)
        trie.survivors(openings.table, state, row)
        whole = [
            t for t in allowed_ids(row, trie.vocabulary.size).tolist() if len(trie.vocabulary.piece(t)) >= len(end)
        ]
        watched.update(whole)
        return [t for t in whole if len(trie.vocabulary.piece(t)) > len(end)]

    @staticmethod
    def _far(openings: Openings, trie: ByteTrie, state: int) -> Iterator[int]:
        for node, _ in trie.entered(openings.table, openings.is_end, state).tolist():
            yield from trie.tokens_below(node)

    def cuts(self, data: bytes) -> list[int]:
        """Where in `data` the text before another call may have ended, as far as `data` tells."""
        return [
            size
            for size in range(1, len(data) + 1)
            if any(text.endswith(data[:size]) or data[:size].endswith(text) for text in self._again)
        ]


@lru_cache(64)
def _holding(vocabulary: Vocabulary, text: bytes) -> frozenset[int]:
    """The tokens that hold a text, not at their beginning; no special ones."""
    return frozenset(
        token
        for token, piece in enumerate(vocabulary.pieces)
        if piece.find(text, 1) > 0 and token not in vocabulary.special_ids
    )


@lru_cache(256)
def _marked(vocabulary: Vocabulary, text: bytes) -> frozenset[int]:
    """The tokens that begin with a text that ends in the mark; no special ones."""
    having = _holding(vocabulary, MARK)
    return frozenset(token for token in having if vocabulary.piece(token).startswith(text))


def _ends(vocabulary: Vocabulary, token: int, text: bytes) -> bool:
    """Whether a token that holds a text holds it at its end alone."""
    piece = vocabulary.piece(token)
    return piece.find(text, 1) == len(piece) - len(text)


class _Frame:
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

    def fork(self) -> _Frame:
        """A copy with a matcher of its own."""
        states = None if self.states is None else [*self.states]
        twin = _Frame(self.begin, states, self.number, self.part)
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

    def __init__(self, grammar: DispatchGrammar, frames: list[_Frame]) -> None:
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
        rest: bytes | None = data
        while rest:
            top = self._frames[-1]
            if top.states is not None:
                rest = self._feed_table(top, top.states, rest, before + 1)
            else:
                rest = self._feed_part(top, rest, before + 1)
        if rest is None:
            self._undo_to(before)
        self._look()
        return rest is not None

    def _feed_table(self, top: _Frame, states: list[int], data: bytes, step: int) -> bytes | None:
        """Read bytes in the table: what is left behind an opening's end; None where they are refused."""
        grammar = self._grammar
        openings, state = grammar.openings, states[-1]
        for place, byte in enumerate(data):
            state = int(openings.table[state, byte])
            if state == DEAD:
                return None
            if openings.ends[state] >= 0:
                part = grammar.part(openings.ends[state], top.number + 1)
                self._frames.append(_Frame(step, None, top.number + 1, part))
                grammar.want(part.key)
                return data[place + 1 :]
        if top.begin == step:  # it began in the middle of this step
            states[-1] = state
        else:
            states.append(state)
        if openings.only[state] >= 0:
            grammar.want(grammar.part(openings.only[state], top.number + 1).key)
        return b""

    def _feed_part(self, top: _Frame, data: bytes, step: int) -> bytes | None:
        """Read bytes in a part: what is left behind the text before another call, where the table goes on; None where they are refused."""
        inner = self._opened(top)
        if top.begin == step:
            top.base = step - 1  # its first step is in the middle of this one
        if top.part is not None and top.part.goes_on:
            for size in self._grammar.crossing.cuts(data):
                if inner.accept_bytes(data[:size]):
                    if _is_marked(inner):
                        self._frames.append(_Frame(step, [self._grammar.openings.behind], top.number))
                        return data[size:]
                    inner.rollback(1)
        return b"" if inner.accept_bytes(data) else None

    def _opened(self, frame: _Frame) -> Matcher:
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
