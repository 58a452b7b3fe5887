"""vLLM's structured output manager, with one more backend.

Invariants:
- Requests of other backends go through vLLM's own code, untouched.
- A lazy request is never waited for: its grammar is assigned at once. An eager one stays a future of our worker, outside the batch.
- Nothing that a request holds can raise out of here: an error becomes a failed future, which ends that request alone.
- Nothing is built before the first request: pooling, diffusion and tokenizer-less engines make this object too.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.adapter.backend import LazyBackend
from vllm_lazy_grammar.adapter.grammar import FAULTS, LazyGrammar
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.adapter.request import read

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

BACKEND = "lazy"


def make_manager(base: type[StructuredOutputManager]) -> type[StructuredOutputManager]:
    """A subclass of vLLM's manager that also serves the backend named ``lazy``."""

    class LazyManager(base):
        """Serves ``lazy`` and leaves the rest to its base."""

        def grammar_init(self, request: Request) -> None:
            """Give the request its grammar, or the future of one."""
            structured: Any = request.structured_output_request
            if structured is None or structured.params._backend != BACKEND:  # noqa: SLF001 -- where vLLM keeps the choice
                super().grammar_init(request)
                return
            try:
                structured.grammar = self._lazy_grammar(request)
            except FAULTS as error:
                logger.error("Request %s is ended: %s: %s", request.request_id, type(error).__name__, error)
                failed: Future[Any] = Future()
                failed.set_exception(error)
                structured.grammar = failed

        def _lazy_grammar(self, request: Request) -> Any:
            backend = self._lazy_backend()
            asked = read(request, compact=backend.compact)
            return backend.eager(asked) if asked.spec is None else backend.lazy(asked)

        def _lazy_backend(self) -> LazyBackend:
            backend: LazyBackend | None = getattr(self, "backend", None)
            if backend is None:
                backend = self.backend = LazyBackend(
                    self.vllm_config,
                    self.tokenizer,
                    self.vllm_config.model_config.get_vocab_size(),
                    inline=not self._use_async_grammar_compilation,
                )
            return backend

        def _fill_bitmasks(self, batch: Iterable[Any]) -> None:
            rows = list(batch)
            super()._fill_bitmasks(rows)
            for grammar, index, applied, *_ in rows:
                if not applied and isinstance(grammar, LazyGrammar):
                    grammar.forbid_end(self._grammar_bitmask, index)

    return LazyManager
