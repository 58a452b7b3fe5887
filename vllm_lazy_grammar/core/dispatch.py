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
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from vllm_lazy_grammar.core.crossing import MARK, Crossing
from vllm_lazy_grammar.core.dispatch_matcher import DispatchMatcher, Frame
from vllm_lazy_grammar.core.network import composed
from vllm_lazy_grammar.core.openings import AmbiguousError, Opening, Openings
from vllm_lazy_grammar.core.prewarm import on_worker
from vllm_lazy_grammar.core.rows import zeros

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.compiles import Compile, GrammarStore
    from vllm_lazy_grammar.core.matcher import CompiledGrammar, GrammarKey, Row
    from vllm_lazy_grammar.core.network import Network

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
    def network(self) -> Network | None:
        """What its texts may be; None where that can not be read."""
        ...


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
        self._lock = threading.RLock()  # whatever is collected meanwhile may ask for its size
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
        return DispatchMatcher(self, [Frame(0, [self.openings.start], 0)])

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
            matcher = DispatchMatcher(self, [Frame(0, None, number + 1, self.part(call, number + 1))])
            self.trie.below(node, matcher, row)
        return row


def _resumed(held: weakref.ref[DispatchGrammar], _: object) -> None:
    grammar = held()
    if grammar is not None:
        grammar.go_on()


def _let_go(parts: dict[GrammarKey, Compile]) -> None:
    for part in parts.values():
        part.release_later()
