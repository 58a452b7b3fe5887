"""What all requests of one engine share, and how a request's session is put together from it.

Invariants:
- Everything here is immutable or has its own lock; a session gets references, never copies.
- Nothing is compiled on the caller's thread, unless the worker is inline, or a step would wait for it and no thread has begun it.
- A compile is held exactly as long as the object that vLLM holds for the request lives.
"""

from __future__ import annotations

import os
import time
import weakref
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputBackend

from vllm_lazy_grammar.adapter.drafting import draft_room
from vllm_lazy_grammar.adapter.faults import Ended
from vllm_lazy_grammar.adapter.grammar import FAULTS, LazyGrammar, RowsOf
from vllm_lazy_grammar.adapter.joiner import TokenizerJoiner
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.adapter.metrics import EngineCounts, tally
from vllm_lazy_grammar.adapter.request import TRACE, GrammarRequest, grammar_key
from vllm_lazy_grammar.adapter.tracing import Tracing
from vllm_lazy_grammar.core import byte_trie, rows
from vllm_lazy_grammar.core.assembly import Assembly
from vllm_lazy_grammar.core.blanks import BlankBound
from vllm_lazy_grammar.core.compiles import Compile, GrammarStore
from vllm_lazy_grammar.core.dispatch import Dispatcher
from vllm_lazy_grammar.core.drafts import Drafts
from vllm_lazy_grammar.core.habits import Habits
from vllm_lazy_grammar.core.leading import FIRST, EndingsStore
from vllm_lazy_grammar.core.likely import likely
from vllm_lazy_grammar.core.prewarm import ROWS, Once, Worker
from vllm_lazy_grammar.core.warm import warm
from vllm_lazy_grammar.core.xargs import PREFIX
from vllm_lazy_grammar.engines.policy import Choice, PolicyEngine
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.settings import Settings
from vllm_lazy_grammar.tools.parts import plan_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.session import Session
    from vllm_lazy_grammar.core.trace import Trace

_MB = 1 << 20
_HELD = 0.005
"""Seconds that a compile may hold a step before it is counted and logged."""
_SHOWN = 200


class Hold:
    """One request's claim on a compile; releasing it twice is once.

    Args:
        compile_: the compile, held.
        told: called when the request is over, with this and what it did.

    Attributes:
        since: when a compile that was not done was claimed, by `time.perf_counter`; None where it was done.
    """

    def __init__(self, compile_: Compile, told: Callable[[Hold, Trace], None] | None = None) -> None:
        self.compile = compile_
        self.since = None if compile_.ready else time.perf_counter()
        self._told = told
        self._released = False

    @property
    def seconds(self) -> float | None:
        """How long the compile took; None while it is not done."""
        return self.compile.seconds

    @property
    def origin(self) -> str:
        """The engine that compiled it, and why that one; empty while it is not done, or where it failed."""
        future = self.compile.future
        done = future.done() and not future.cancelled() and future.exception() is None
        return future.result().origin if done else ""

    def release(self) -> None:
        """Give it back."""
        if not self._released:
            self._released = True
            self.compile.release()

    def over(self, trace: Trace) -> None:
        """The request is over: give it back, and tell what the request did."""
        self.release()
        if self._told is not None:
            self._told(self, trace)


class LazyBackend(StructuredOutputBackend):
    """The backend named ``lazy``.

    Args:
        vllm_config: settings are read from its ``additional_config``.
        tokenizer: vLLM's.
        vocab_size: the model's, padding counted.
        inline: use no threads (vLLM's external launcher).

    Attributes:
        steps_held: steps that the compile of one call's grammar held for more than 5 ms.
    """

    def __init__(self, vllm_config: Any, tokenizer: Any, vocab_size: int, *, inline: bool = False) -> None:
        super().__init__(vllm_config, tokenizer, vocab_size)
        self.settings = settings = Settings.from_additional_config(vllm_config.additional_config)
        self.compact = vllm_config.structured_outputs_config.disable_any_whitespace
        self.undeclared = settings.undeclared_properties == "allow"
        first = XgrammarEngine.for_tokenizer(
            tokenizer,
            vocab_size,
            cache_limit_bytes=settings.grammar_cache_mb * _MB,
            max_threads=max(1, min(8, (os.cpu_count() or 1) // 2)),  # the model runs meanwhile
        )
        self.engine = PolicyEngine(first, Choice(settings.engine, settings.relax), logger.warning)
        self.vocabulary = self.engine.vocabulary
        self.rows = rows.RowCache(settings.row_cache_mb * _MB)
        self.worker = Worker(0 if inline else settings.threads)
        self.trie = byte_trie.ByteTrie(self.vocabulary)
        self.steps_held = 0
        self.store = GrammarStore(
            self.engine,
            self.worker,
            self.rows,
            self.vocabulary.row_words,
            limit_bytes=settings.grammar_cache_mb * _MB,
            top_k=settings.prewarm_top_k if settings.prewarm else 0,
            dispatcher=Dispatcher(self.trie, plan_of, self._note_wait) if settings.dispatch else None,
            on_warm=_warmed,
            on_compile=self._note_compile,
        )
        self.bound = BlankBound(self.vocabulary, settings.whitespace_bound)
        self.endings = EndingsStore(self.vocabulary, self.trie, self.worker) if settings.budget else None
        self.assembly = Assembly(
            self.vocabulary,
            self.trie,
            self.rows,
            self.bound,
            endings=self.endings,
            timeout_ms=settings.trigger_timeout_ms,
        )
        slow = {} if self.endings is None else {"endings": self.endings}
        self.counts = EngineCounts(
            partial(tally, vllm_config) if settings.metrics else lambda: None,
            {"grammars": self.store, "rows": self.rows},
            slow,
        )
        self.rows_of = RowsOf()
        self.tracing = Tracing(settings, self.vocabulary) if settings.trace_dir else None
        self.draft_room = draft_room(vllm_config, wanted=settings.drafts)
        self._joiner = TokenizerJoiner(tokenizer, self.vocabulary)
        self._habits = Habits(self.vocabulary)
        warm()

    def _note_wait(self, key: GrammarKey, seconds: float) -> None:
        """A step waited for the part of a grammar that a call went into."""
        self.counts.waited("part", seconds)
        if seconds > _HELD:
            self.steps_held += 1
            logger.info("A step was held for %.1f ms by the compile of %s", seconds * 1e3, key.source[:_SHOWN])

    def _note_compile(self, compile_: Compile) -> None:
        self.counts.compiled(compile_)

    def _hold(self, request: GrammarRequest) -> Hold:
        return Hold(self.store.get(request.key), partial(self.counts.over, request.kind))

    def eager(self, request: GrammarRequest) -> Future[StructuredOutputGrammar]:
        """A future of the request's grammar: vLLM keeps the request out of the batch until it is done."""
        hold = self._hold(request)
        future: Future[StructuredOutputGrammar] = Future()
        finalizer = weakref.finalize(future, self._unserved, request.kind, hold)
        finalizer.atexit = False
        resolve = partial(self._resolve, weakref.ref(future), finalizer, request, hold)
        hold.compile.future.add_done_callback(Once(resolve))
        return future

    def _unserved(self, kind: str, hold: Hold) -> None:
        """A request is over before it had a grammar."""
        hold.release()
        self.counts.unserved(kind)

    def _resolve(
        self,
        target: weakref.ref[Future[Any]],
        finalizer: Any,
        request: GrammarRequest,
        hold: Hold,
        compiled: Future[Any],
    ) -> None:
        future = target()
        if future is None or compiled.cancelled():
            return
        if hold.since is not None:
            self.counts.waited("queue", time.perf_counter() - hold.since)
        finalizer.detach()
        error = compiled.exception()
        if error is not None:
            logger.error("Request %s is ended: %s", request.request_id, error)
            self._unserved(request.kind, hold)
            future.set_result(Ended(error))
            return
        try:
            grammar = self._grammar(request, hold)
        except FAULTS as fault:
            logger.error("Request %s is ended: %s: %s", request.request_id, type(fault).__name__, fault)
            self._unserved(request.kind, hold)
            future.set_result(Ended(fault))
            return
        future.set_result(grammar)

    def lazy(self, request: GrammarRequest) -> LazyGrammar:
        """The request's grammar, at once: it is compiled while the trigger is awaited."""
        hold = self._hold(request)
        try:
            grammar = self._grammar(request, hold)
        except FAULTS:
            self._unserved(request.kind, hold)
            raise
        if hold.compile.prewarmed:
            hold.compile.future.add_done_callback(Once(partial(self._prewarm_awaiting, request)))
        return grammar

    def _prewarm_awaiting(self, request: GrammarRequest, compiled: Future[Any]) -> None:
        """Have the first row of the awaiting request made on the worker, now that it is known what the grammar refuses."""
        if compiled.cancelled() or compiled.exception() is not None:
            return

        def fill() -> None:
            hold = Hold(self.store.get(request.key, counts=False))
            try:
                self._session(request, hold.compile).fill(rows.zeros(self.vocabulary.row_words))
            finally:
                hold.release()

        self.worker.submit(fill, ROWS)

    def _grammar(self, request: GrammarRequest, hold: Hold) -> LazyGrammar:
        session = self._session(request, hold.compile)
        if request.budget <= FIRST:
            hold.compile.future.add_done_callback(partial(_look_ahead, weakref.ref(session)))
        if self.tracing is not None and self.tracing.wants(request):
            triggers = None if request.spec is None else self.assembly.triggers(request.spec, request.stop_ids)
            return self.tracing.grammar(request, session, hold, self.rows_of, triggers)
        if request.traced and self.tracing is None:
            raise RequestError(PREFIX + TRACE, 1, "this server writes no traces: its setting trace_dir names no folder")
        return LazyGrammar(request, session, hold, self.rows_of)

    def _session(self, request: GrammarRequest, compile_: Compile) -> Session:
        return self.assembly.session(request, compile_, self._drafts(request.key) if self.draft_room else None)

    def _drafts(self, key: GrammarKey) -> Drafts:
        return Drafts(self.vocabulary, self._joiner, likely(key), self._habits, key.kind)

    def marker(self, reasoner: Any) -> tuple[int, ...]:
        """The tokens that end the reasoning, as vLLM's parser for it has them; empty where it names none."""
        text = reasoner.reasoning_end_str
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """An eager grammar, compiled here and now. vLLM's manager asks `eager` instead; this serves whoever holds a bare backend."""
        key = grammar_key(request_type.name.lower(), grammar_spec, compact=self.compact, undeclared=self.undeclared)
        stops = self.vocabulary.eos_ids if stop_token_ids is None else frozenset(stop_token_ids)
        return self.eager(GrammarRequest("-", key, None, stops)).result()

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """All-ones mask rows, int32, shape ``(max_num_seqs, ceil(vocab_size / 32))``."""
        return torch.full((max_num_seqs, self.vocabulary.row_words), rows.ALL, dtype=torch.int32)

    def destroy(self) -> None:
        """End the worker; what has not started never starts."""
        self.worker.close()
        self.counts.close()
        if self.tracing is not None:
            self.tracing.close()


def _warmed(compile_: Compile) -> None:
    key = compile_.key
    logger.debug(
        "Grammar %s %.60r: %d rows warmed of %d asked for", key.kind, key.source, compile_.warmed, compile_.asked
    )


def _look_ahead(held: weakref.ref[Session], compiled: Future[Any]) -> None:
    """Have the grammar's endings worked out: the request's budget will ask for them soon."""
    session = held()
    if session is not None and not compiled.cancelled() and compiled.exception() is None:
        session.look_ahead()
