"""Leading out: near the end of a request's budget its rows lose the tokens behind which the grammar could no longer be completed.

The text since the grammar began hangs on the position as a chain, newest part first; what was read of it is kept, so a look costs what came since.
How near the end is, is looked at rarely while it is far: each time another eighth of the distance is gone, and again where tokens were taken back.

Invariants:
- A row is a function of position and budget; nothing is looked at above `FIRST` tokens, and nothing is changed above `far(shortest)` of them.
- Rows only lose bits, and never the last ones: where a budget can not be kept the row is left as it was, and the trace says so.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from concurrent.futures import wait
from functools import lru_cache, partial
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable
from weakref import WeakKeyDictionary, ref

import numpy as np

from vllm_lazy_grammar.core.endings import Endings
from vllm_lazy_grammar.core.pieces import Pieces
from vllm_lazy_grammar.core.prewarm import ENDINGS, Task
from vllm_lazy_grammar.core.rows import IdSet, is_allowed, open_row
from vllm_lazy_grammar.core.shortest import TooMuchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_lazy_grammar.core.byte_trie import ByteTrie
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.inside import Inside
    from vllm_lazy_grammar.core.journal import Position, Text
    from vllm_lazy_grammar.core.matcher import CompiledGrammar, Matcher, Row
    from vllm_lazy_grammar.core.network import Network
    from vllm_lazy_grammar.core.prewarm import Worker
    from vllm_lazy_grammar.core.trace import Trace
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

FIRST = 1024
"""Tokens left above which nothing is looked at."""


WAIT = 128
"""Tokens left from which on endings that are still being worked out are waited for: at each step a little, longer the nearer the end is."""

_PATIENCE = 0.5
"""Seconds: with `n` tokens left a step waits for at most an `n`-th of it, so that one request's endings do not hold up all others."""

_SETS = 8
"""Sets of ids that are never text, for which a grammar's endings are kept."""

KEPT_BYTES = 256 << 20
"""Memory that the endings of all grammars may take; what is in use beyond stays until it is not."""


def far(shortest: int) -> int:
    """Tokens left above which rows are those without a budget."""
    return 4 * shortest + 64


@runtime_checkable
class HasNetwork(Protocol):
    """A compiled grammar that can show its states."""

    def network(self) -> Network | None:
        """The grammar as a network; None where it can not be shown."""


class Prepared:
    """The endings of one grammar, worked out once, by the worker where there is one. Thread-safe.

    Args:
        make: works them out; None where they can not be found out.
        worker: does it ahead; None: whoever asks first does.

    Attributes:
        used: when they were asked for last, in the order of whoever keeps them.
    """

    def __init__(self, make: Callable[[], Endings | None], worker: Worker | None = None) -> None:
        self._task: Task[Endings | None] = Task(make)
        self._worker = worker
        self._lock = threading.Lock()
        self._is_begun = False
        self.used = 0

    @property
    def nbytes(self) -> int:
        """Memory held, about; 0 until they are there."""
        future = self._task.future
        if not self.ready or future.cancelled() or future.exception() is not None:
            return 0
        endings = future.result()
        return 0 if endings is None else endings.nbytes

    @property
    def ready(self) -> bool:
        """Whether `get` answers without waiting."""
        return self._task.done()

    def begin(self) -> None:
        """Have it done; returns at once where there is a worker."""
        with self._lock:
            begun, self._is_begun = self._is_begun, True
        if begun:
            return
        if self._worker is None:
            self._task.run()
        else:
            self._worker.submit(self._task.run, ENDINGS)

    def wait(self, seconds: float) -> bool:
        """Wait for them, so long at most; whether they are there."""
        return bool(wait([self._task.future], seconds).done)

    def get(self) -> Endings | None:
        """The endings; None where they can not be found out."""
        self.begin()
        return self._task.result()


class EndingsStore:
    """The endings of all grammars of one engine. Thread-safe; its lock is never held while something is worked out.

    Args:
        vocabulary: the model's.
        trie: its pieces.
        worker: works them out; None: whoever asks first does.
        limit_bytes: bound of what is kept, the least recently asked for goes first; checked when another grammar's are begun.

    Attributes:
        hits: how often a request's endings were there, or on their way.
        misses: how often they had to be begun.
    """

    def __init__(
        self, vocabulary: Vocabulary, trie: ByteTrie, worker: Worker | None = None, *, limit_bytes: int = KEPT_BYTES
    ) -> None:
        self.vocabulary, self._trie, self._worker, self._limit = vocabulary, trie, worker, limit_bytes
        self._uses = count()
        self._found: WeakKeyDictionary[CompiledGrammar, OrderedDict[frozenset[int], Prepared]] = WeakKeyDictionary()
        self._pieces = lru_cache(_SETS)(partial(Pieces, trie))
        self.hits = self.misses = 0
        self._lock = threading.Lock()
        self._nbytes = 0

    def get(self, grammar: CompiledGrammar, never: frozenset[int]) -> Prepared:
        """The endings of a grammar where the ids in `never` are not text, there or to come."""
        with self._lock:
            known = self._found.setdefault(grammar, OrderedDict())
            found = known.get(never)
            self.hits += found is not None
            if found is None:
                self.misses += 1
                self._make_room()
                found = known[never] = Prepared(partial(self._made, ref(grammar), never), self._worker)
                if len(known) > _SETS:
                    known.popitem(last=False)
            found.used = next(self._uses)
            return found

    @property
    def nbytes(self) -> int:
        """Memory held by what is kept, about; what it was last where somebody has the lock: whoever asks may do so from inside of it."""
        if self._lock.acquire(blocking=False):
            try:
                self._nbytes = sum(prepared.nbytes for known in self._found.values() for prepared in known.values())
            finally:
                self._lock.release()
        return self._nbytes

    def _make_room(self) -> None:
        held = [
            (each.used, each.nbytes, known, never) for known in self._found.values() for never, each in known.items()
        ]
        total = sum(nbytes for _, nbytes, _, _ in held)
        for _, nbytes, known, never in sorted(held, key=itemgetter(0)):
            if total <= self._limit:
                break
            total -= nbytes
            del known[never]

    def forget(self, grammar: CompiledGrammar, never: frozenset[int]) -> None:
        """Begin anew with the next request: what was kept has grown as large as it may."""
        with self._lock:
            self._found.get(grammar, OrderedDict()).pop(never, None)

    def _made(self, held: ref[CompiledGrammar], never: frozenset[int]) -> Endings | None:
        grammar = held()
        network = grammar.network() if isinstance(grammar, HasNetwork) else None
        if network is None:
            return None
        try:
            endings = Endings(network, self._pieces(never), self.vocabulary.row_words)
            endings.prepare()
        except (TooMuchError, RecursionError):
            return None
        return endings


class LeadingOut:
    """One request's way out.

    Args:
        store: the endings of its grammar.
        inside: what the grammar takes, and the stop ids.
        compile_: the grammar; joined by whoever asks for a row before this does.
        trace: told where the budget can not be kept.
    """

    def __init__(self, store: EndingsStore, inside: Inside, compile_: Compile, trace: Trace) -> None:
        self._store, self._inside, self._compile, self._trace = store, inside, compile_, trace
        self._never = inside.control.ids | inside.stop_ids
        self._kept = 1 if inside.stop_ids else 0
        self._stops = IdSet(inside.stop_ids, inside.vocabulary.size)
        self._single = {token: IdSet([token], inside.vocabulary.size) for token in inside.control.spelled}
        self._matcher: Matcher | None = None
        self._look_at = self._looked_at = FIRST
        self._marks: dict[int, tuple[Text | None, int]] = {}
        self._asked: Prepared | None = None
        self._is_lost = False

    def fork(self) -> Self:
        """The same for another session at the same position."""
        twin = copy.copy(self)
        twin._marks = {}  # noqa: SLF001 -- our own twin
        twin._matcher = None  # noqa: SLF001 -- our own twin
        return twin

    def shortest(self, remaining: int) -> int | None:
        """Tokens of the grammar's shortest text, the stop id included; None where that is not known, or not yet and there is time. Joins the compile."""
        if self._compile.future.exception() is not None:
            return None
        endings = self._endings(remaining)
        return None if endings is None else endings.needs(endings.start) + self._kept

    def _endings(self, remaining: int) -> Endings | None:
        prepared = self._prepared()
        if not prepared.ready:
            prepared.begin()
            if remaining > WAIT or not self._waited(prepared, _PATIENCE / max(1, remaining)):
                return None
        endings = prepared.get()
        self._trace.budget_lost |= endings is None
        return endings

    def _waited(self, prepared: Prepared, seconds: float) -> bool:
        begin = time.perf_counter()
        is_there = prepared.wait(seconds)
        self._trace.endings_seconds += time.perf_counter() - begin
        return is_there

    def _prepared(self) -> Prepared:
        if self._asked is None:
            self._asked = self._store.get(self._compile.result(), self._never)
        return self._asked

    def begin(self) -> None:
        """Have the grammar's endings worked out; the compile is done."""
        self._prepared().begin()

    def rests(self, remaining: int) -> bool:
        """Whether `lead`, asked one row after the other, would have no look at the row with so many tokens left."""
        return remaining > self._look_at

    def lead(self, at: Position, row: Row, remaining: int, *, masks: bool) -> bool:
        """Clear what would not fit into the budget.

        Args:
            at: inside the grammar.
            row: the position's row.
            remaining: tokens that may still be sampled, the next one included.
            masks: whether the row masks anything.

        Returns:
            Whether the row masks anything now.
        """
        if at.matcher is not self._matcher:
            self._matcher, self._look_at, self._is_lost = at.matcher, FIRST, False
            self._marks.clear()
        if remaining >= self._looked_at:
            self._look_at = FIRST
        if remaining > self._look_at or remaining <= 0 or self._is_lost:  # nobody samples behind the last token
            return masks
        try:
            return self._led(at, row, remaining, masks=masks)
        except TooMuchError:
            self._trace.budget_lost = self._is_lost = True  # what took too much would do so again at every step
            self._store.forget(self._compile.result(), self._never)
            return masks

    def _led(self, at: Position, row: Row, remaining: int, *, masks: bool) -> bool:
        self._looked_at = remaining
        endings = self._endings(remaining)
        if endings is None:
            return masks
        stand = self._stand(endings, at)
        needs = endings.needs(stand) + self._kept
        if needs > remaining:
            if self._trace.needed is None:
                self._trace.needed = needs
            return masks
        distance = remaining - far(needs)
        if distance > 0:
            self._look_at = remaining - max(1, distance // 8)
            return masks
        return self._cleared(endings, stand, row, remaining - 1 - self._kept, masks=masks)

    def _cleared(self, endings: Endings, stand: int, row: Row, limit: int, *, masks: bool) -> bool:
        if not masks:
            np.copyto(row, open_row(self._store.vocabulary))
            if not endings.needs(stand):
                self._stops.allow(row)
        cleared = endings.mask(stand, row, limit)
        for token, single in self._single.items():
            if is_allowed(row, token, self._store.vocabulary.size) and token not in self._inside.stop_ids:
                behind = endings.advance(stand, token, self._inside.vocabulary.piece(token))
                if endings.needs(behind) > limit:
                    single.mask(row)
                    cleared = True
        if not masks and not cleared:
            row.fill(-1)
        self._trace.led_out |= cleared
        return masks or cleared

    def _stand(self, endings: Endings, at: Position) -> int:
        """The stand behind a position's text: read from the last place that was read before."""
        parts: list[int | bytes] = []
        text, depth = at.text, at.steps
        while text is not None and self._mark(text, depth) is None:
            text, part = text
            parts.append(part)
            depth -= 1
        known = None if text is None else self._mark(text, depth)
        stand = endings.start if known is None else known
        for part in reversed(parts):
            stand = endings.advance(
                stand, part, part if isinstance(part, bytes) else self._inside.vocabulary.piece(part)
            )
        self._marks[at.steps] = (at.text, stand)
        return stand

    def _mark(self, text: Text, depth: int) -> int | None:
        """The stand behind a text that was read before; None where it was not."""
        mark = self._marks.get(depth)
        return mark[1] if mark is not None and mark[0] is text else None
