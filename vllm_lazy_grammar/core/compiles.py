"""Compiled grammars, each compiled once however many requests ask for it, and the rows of their first positions.

Invariants:
- One compile per key at a time; equal keys share it, `n=8` included.
- A compile that nobody holds any more and that has not started never starts.
- Grammars that nobody holds are kept up to a limit in bytes, the least recently used go first; a held one is never dropped. They are in
  `_idle` with the bytes that they had when they came there, so that keeping the limit costs nothing in their number.
- One lock guards the tables; compiling and filling rows happen outside it (inline workers apart, where there is one thread). It may be taken
  again by the thread that has it: a request may be dropped, and give its grammar back, wherever Python collects what nobody refers to.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vllm_lazy_grammar.core.dispatch import DispatchGrammar
from vllm_lazy_grammar.core.prewarm import AHEAD, COMPILE, ROWS, Once

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from vllm_lazy_grammar.core.dispatch import Dispatcher
    from vllm_lazy_grammar.core.matcher import CompiledGrammar, Engine, GrammarKey, Matcher, Row
    from vllm_lazy_grammar.core.prewarm import Task, Worker
    from vllm_lazy_grammar.core.rows import RowCache


class Compile:
    """One grammar on its way, or there; shared by the requests that hold it.

    Attributes:
        key: what is compiled.
        seconds: how long the compile took; None until it is done.
        path: the bytes that begin every sentence, as far as rows were prewarmed; None until known.
        warmed: rows that were prewarmed.
        asked: positions for which a row was wanted.
    """

    def __init__(self, key: GrammarKey, store: GrammarStore) -> None:
        self.key = key
        self.seconds: float | None = None
        self.path: bytes | None = None
        self.warmed = self.asked = 0
        self.holders = 0
        self._store = store
        self.task: Task[CompiledGrammar]
        self.rows_task: Task[int] | None = None

    @property
    def ready(self) -> bool:
        """Whether `result` returns, or raises, without waiting."""
        return self.task.done()

    @property
    def future(self) -> Future[CompiledGrammar]:
        """The compile as a future, for whoever waits outside the batch."""
        return self.task.future

    def join(self) -> CompiledGrammar:
        """The grammar; compiled here where nobody has begun. Raises what the compile raised."""
        self.task.run()
        return self.task.result()

    def finish(self) -> None:
        """Have it done, here where nobody has begun; raises nothing."""
        self.task.run()
        wait([self.task.future])

    def result(self) -> CompiledGrammar:
        """Join the compile, and nothing else. Raises what the compile raised."""
        return self.task.result()

    @property
    def prewarmed(self) -> bool:
        """Whether rows of its first positions are made ahead at all."""
        return self._store.top_k > 0

    @property
    def prewarm_finished(self) -> bool:
        """Whether every row that was wanted is warm; does not join."""
        return self.ready and (self.rows_task is None or self.rows_task.done())

    def join_rows(self) -> int:
        """Join compile and rows; how many rows were warmed."""
        self.result()
        return 0 if self.rows_task is None else self.rows_task.result()

    def release(self) -> None:
        """One request fewer holds it."""
        self._store.release(self)

    def release_later(self) -> None:
        """The same with the store's next call; takes no lock, and so may be called by what is collected."""
        self._store.late.append(self)


class GrammarStore:
    """All grammars of one engine.

    Args:
        engine: compiles.
        worker: where.
        rows: shared cache that the prewarmed rows go to, under ``(key, bytes so far)``.
        row_words: words of a mask row.
        limit_bytes: bound of what is kept for later requests.
        top_k: at most so many rows are prewarmed per grammar; 0 turns it off.
        dispatcher: takes grammars apart that choose between calls; None: every grammar is compiled in one piece.
        on_warm: called with a `Compile` once everything of it is warm.
        on_compile: called with a `Compile` once it is done, or has failed; on whatever thread that was.

    Attributes:
        hits: how often a grammar that was asked for was there, or on its way.
        misses: how often its compile had to be begun.
        nbytes: memory of the grammars that nobody holds and are kept.
    """

    def __init__(  # noqa: PLR0913 -- what is shared by all requests meets here once
        self,
        engine: Engine,
        worker: Worker,
        rows: RowCache,
        row_words: int,
        *,
        limit_bytes: int,
        top_k: int,
        dispatcher: Dispatcher | None = None,
        on_warm: Callable[[Compile], None] | None = None,
        on_compile: Callable[[Compile], None] | None = None,
    ) -> None:
        self._engine, self._worker, self.rows, self._row_words = engine, worker, rows, row_words
        self._limit, self.top_k, self._on_warm = limit_bytes, top_k, on_warm
        self._on_compile = on_compile
        self.hits = self.misses = self.nbytes = 0
        self._dispatcher = dispatcher
        self._lock = threading.RLock()  # cancelling calls back into `_forget`
        self._table: dict[GrammarKey, Compile] = {}
        self._idle: OrderedDict[GrammarKey, int] = OrderedDict()
        self.late: deque[Compile] = deque()

    def get(self, key: GrammarKey, *, counts: bool = True) -> Compile:
        """Hold the compile of `key`, which starts now if it has not; pair with `Compile.release`. Only a request's own look-up `counts`."""
        return self._get(key, is_part=False, counts=counts)

    def get_part(self, key: GrammarKey) -> Compile:
        """Hold the compile of a part of a dispatched grammar: one piece, compiled ahead, without rows of its own."""
        return self._get(key, is_part=True, counts=True)

    def _get(self, key: GrammarKey, *, is_part: bool, counts: bool) -> Compile:
        self._release_late()
        with self._lock:
            found = self._table.get(key)
            if counts:
                self.hits += found is not None
                self.misses += found is None
            if found is not None:
                found.holders += 1
                self.nbytes -= self._idle.pop(key, 0)
            else:
                compile_ = self._table[key] = Compile(key, self)
                compile_.holders = 1
                work = partial(self._timed, compile_, is_part=is_part)
                # Under the lock, so that nobody finds it without its task; inline workers run it here, and nobody else is there then.
                compile_.task = self._worker.submit(work, AHEAD if is_part else COMPILE)
        if found is not None:
            self._attend(found)
            return found
        compile_.future.add_done_callback(Once(partial(self._compiled, compile_, warms=not is_part)))
        return compile_

    def hasten(self, compile_: Compile) -> None:
        """Somebody will wait for it: it comes before what is compiled ahead."""
        self._worker.again(compile_.task, COMPILE)

    @property
    def works_ahead(self) -> bool:
        """Whether anything is done before somebody needs it."""
        return not self._worker.is_inline

    def _timed(self, compile_: Compile, *, is_part: bool) -> CompiledGrammar:
        begin = time.perf_counter()
        try:
            apart = None if is_part or self._dispatcher is None else self._dispatcher.grammar(compile_.key, self)
            return self._engine.compile(compile_.key) if apart is None else apart
        finally:
            compile_.seconds = time.perf_counter() - begin

    def _attend(self, compile_: Compile) -> None:
        """Tell a dispatched grammar whether anybody holds it; under the lock, so that what is told last is true."""
        if not compile_.ready or self._failed(compile_):
            return
        grammar = compile_.result()
        if isinstance(grammar, DispatchGrammar):
            with self._lock:
                grammar.resume() if compile_.holders else grammar.pause()

    def _compiled(self, compile_: Compile, future: Future[CompiledGrammar], *, warms: bool) -> None:
        self._attend(compile_)
        if self._on_compile is not None and not future.cancelled():
            self._on_compile(compile_)
        if future.cancelled() or future.exception() is not None:
            self._forget(compile_)
        elif self.top_k and warms:
            compile_.rows_task = self._worker.submit(lambda: self._warm(compile_, future.result()), ROWS)
        self._rest(compile_)

    def _warm(self, compile_: Compile, grammar: CompiledGrammar) -> int:
        costs: list[tuple[float, bytes, Row]] = []
        path, matcher = b"", grammar.matcher()
        while len(costs) < self.top_k:
            row = np.empty(self._row_words, np.int32)
            begin = time.perf_counter()
            matcher.fill(row)
            costs.append((time.perf_counter() - begin, path, row))
            step = self._certain_byte(matcher)
            if not step or not matcher.accept_bytes(step):
                break
            path += step
        costs.sort(key=lambda cost: cost[0])  # the costliest last: what was put last is evicted last
        for _, prefix, row in costs:
            self.rows.put((compile_.key, prefix), row)
        compile_.path, compile_.asked, compile_.warmed = path, len(costs), len(costs)
        if self._on_warm is not None:
            self._on_warm(compile_)
        return len(costs)

    @staticmethod
    def _certain_byte(matcher: Matcher) -> bytes:
        return b"" if matcher.is_completed() else matcher.certain()[:1]

    def release(self, compile_: Compile) -> None:
        """One holder fewer; what nobody holds is cancelled where it has not started, else kept while there is room."""
        self._release(compile_)
        self._release_late()

    def _release_late(self) -> None:
        while self.late:
            self._release(self.late.popleft())

    def _release(self, compile_: Compile) -> None:
        with self._lock:
            compile_.holders -= 1
            if not compile_.holders and not compile_.ready:
                compile_.task.cancel()
        self._attend(compile_)
        self._rest(compile_)

    @staticmethod
    def _failed(compile_: Compile) -> bool:
        return compile_.ready and (compile_.future.cancelled() or compile_.future.exception() is not None)

    def _forget(self, compile_: Compile) -> None:
        with self._lock:
            if self._table.get(compile_.key) is compile_:
                del self._table[compile_.key]

    def _rest(self, compile_: Compile) -> None:
        """Keep what nobody holds, as far as there is room."""
        if compile_.holders or not compile_.ready or self._failed(compile_):
            return
        nbytes, dropped = compile_.result().nbytes, list[Compile]()
        with self._lock:
            if compile_.holders or self._table.get(compile_.key) is not compile_:
                return
            self.nbytes += nbytes - self._idle.pop(compile_.key, 0)
            self._idle[compile_.key] = nbytes
            while self.nbytes > self._limit:
                key, freed = self._idle.popitem(last=False)
                self.nbytes -= freed
                dropped.append(self._table.pop(key))
        dropped.clear()  # outside the lock: what they were made of may give parts back

    def __len__(self) -> int:
        return len(self._table)
