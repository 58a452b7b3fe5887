"""vLLM's structured output manager, with one more backend.

Invariants:
- Requests of other backends go through vLLM's own code, untouched.
- A lazy request is never waited for: its grammar is assigned at once. An eager one stays a future of our worker, outside the batch.
- Nothing that a request holds can raise out of here: an error becomes a grammar that ends its request at the first token, and it alone.
- A request that is ended here carries the reason in its `stop_reason`.
- The vocabulary and what is compiled for it are built before the first request, and only where `lazy` is the engine's backend and the
  engine writes tokens: pooling, diffusion and tokenizer-less engines make this object too.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.request import RequestStatus

from vllm_lazy_grammar.adapter.backend import LazyBackend
from vllm_lazy_grammar.adapter.faults import Ended, heard
from vllm_lazy_grammar.adapter.grammar import FAULTS, LazyGrammar, Reasoning
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.adapter.request import read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output import StructuredOutputManager as _Base
else:
    _Base = object

BACKEND = "lazy"
_RUNNING = RequestStatus.RUNNING


class ServesLazy(_Base):
    """What is added to vLLM's manager, in front of it: serves ``lazy`` and leaves the rest to the class behind."""

    _grammar_bitmask: torch.Tensor | None
    _is_unreasoned = False
    """Our backend is in use, and no reasoning parser decides when a grammar begins."""
    _is_plain = False
    """Besides, every token is written once: the rows of a step are those of its sessions, drafts or not."""

    _draft_room = 0
    """Drafts of a request in one step, where the grammar's own are among them."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        model = vllm_config.model_config
        writes = model.runner_type == "generate" and not model.skip_tokenizer_init and not model.is_diffusion
        if writes and vllm_config.structured_outputs_config.backend == BACKEND:
            self._lazy_backend()

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
            structured.grammar = Ended(error)

    def _lazy_grammar(self, request: Request) -> Any:
        # The front end says that reasoning is over where a client does not want to see it; the prompt knows better.
        request.structured_output_request.reasoning_ended = None
        backend = self._lazy_backend()
        asked = read(
            request,
            backend.vocabulary,
            compact=backend.compact,
            undeclared=backend.undeclared,
            max_model_len=self.vllm_config.model_config.max_model_len,
        )
        _take_min_tokens(request)
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
            self._draft_room = backend.draft_room
            self._is_unreasoned = self.reasoner_cls is None
            self._is_plain = self._is_unreasoned and not self.vllm_config.model_config.is_diffusion
        return backend

    def grammar_bitmask(
        self,
        requests: dict[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> Any:
        """The rows of one step: straight from the sessions where nothing else has a say, else as vLLM lays them out."""
        ids = structured_output_request_ids
        if not self._is_plain or not ids:
            for request_id in ids:
                self._begin_step(requests[request_id], scheduled_spec_decode_tokens.get(request_id, ()))
            return super().grammar_bitmask(requests, ids, scheduled_spec_decode_tokens)
        backend: LazyBackend = self.backend
        bitmask = self._grammar_bitmask
        if bitmask is None:
            rows = self.vllm_config.scheduler_config.max_num_seqs * (1 + self.vllm_config.num_speculative_tokens)
            bitmask = self._grammar_bitmask = backend.allocate_token_bitmask(rows)
        rows_of_all, at = backend.rows_of(bitmask), 0
        for request_id in ids:
            request, drafts = requests[request_id], scheduled_spec_decode_tokens.get(request_id)
            grammar = _grammar_of(request)
            if self._draft_room and isinstance(grammar, LazyGrammar):
                grammar.schedules(len(drafts or ()))
            if drafts:
                end = at + len(drafts) + 1
                grammar.fill_window(rows_of_all[at:end], drafts, request.num_output_tokens)
                at = end
            else:
                grammar.fill_row(rows_of_all[at], request.num_output_tokens, keep=False)
                at += 1
        return rows_of_all[:at]

    def _begin_step(self, request: Request, drafts: Sequence[int]) -> None:
        """Tell the request's grammar where in its budget the step's first row stands, and how the reasoning that goes on would end."""
        structured: Any = request.structured_output_request
        grammar = structured.grammar
        if not isinstance(grammar, LazyGrammar):
            return
        grammar.spent = request.num_output_tokens
        grammar.schedules(len(drafts))
        reasons = grammar.is_near_end and not structured.reasoning_ended and not self.enable_in_reasoning
        reasoner = self._get_reasoner(request) if reasons else None
        end = () if reasoner is None else self.backend.marker(reasoner)
        grammar.reasons(Reasoning(end, [*request.output_token_ids, *drafts]) if end else None)

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Advance the request's grammar; false ends the request."""
        structured: Any = request.structured_output_request
        if self._draft_room and structured is not None and isinstance(grammar := _grammar_of(request), LazyGrammar):
            grammar.judge_drafts(new_token_ids)
        if not self._is_unreasoned or structured is None or not new_token_ids:
            # Reasoning would go on without its grammar being asked.
            over = bool(new_token_ids) and _has_ended(structured)
            accepted = not over and bool(super().accept_tokens(request, new_token_ids))
        else:
            structured.reasoning_ended = True  # there is none without a parser, and vLLM notes it so
            accepted = _grammar_of(request).accept_tokens(request.request_id, new_token_ids)
        if structured is not None and (not accepted or (request.status is not _RUNNING and request.is_finished())):
            if not accepted and isinstance(structured.grammar, LazyGrammar | Ended):
                self._end(request, structured.grammar)
            _finish(structured)
        return accepted

    def _end(self, request: Request, grammar: LazyGrammar | Ended) -> None:
        """The request is ended by its grammar: its client is told why, and it is counted."""
        request.stop_reason = grammar.told(request)
        fault, backend = heard(request.stop_reason), getattr(self, "backend", None)
        if fault is not None and isinstance(backend, LazyBackend):
            backend.counts.ended(fault)

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """The proposer's drafts as far as the grammar takes them, and what the grammar itself knows of the text to come."""
        structured: Any = request.structured_output_request
        kept: list[int]
        if self._is_unreasoned and structured is not None:
            known = spec_tokens[: spec_tokens.index(-1)] if -1 in spec_tokens else spec_tokens
            kept = _grammar_of(request).validate_tokens(known) if known else known
        else:
            kept = super().validate_tokens(request, spec_tokens)
        room = min(self._draft_room, request.max_tokens - request.num_output_tokens - 1) - len(kept)
        begun = structured is not None and (self._is_unreasoned or structured.reasoning_ended)
        if room <= 0 or not begun or not isinstance(structured.grammar, LazyGrammar):
            return kept
        return [*kept, *structured.grammar.draft(room, kept)]

    def _get_constraint_bounds(
        self, request: Request, spec_tokens: Sequence[int], *committed: Any, **named: Any
    ) -> Any:
        """Where tokens begin to count: the gate also sees the token that ends the reasoning, which a trigger may name."""
        bounds = super()._get_constraint_bounds(request, spec_tokens, *committed, **named)
        start = bounds.grammar_start
        ends_here = 0 < start == bounds.constraint_start <= len(spec_tokens)
        structured: Any = request.structured_output_request
        if ends_here and _has_gate(structured):
            structured.grammar.session.behind_reasoning()
            return bounds._replace(grammar_start=start - 1)
        return bounds

    def _masked_reasoning_ends(self, request: Request) -> Any:
        """The tokens that may not end the reasoning; vLLM 0.33 asks once a request, maybe while its grammar still compiles."""
        structured: Any = request.structured_output_request
        grammar, base = structured.grammar, cast("Any", super())
        if not isinstance(grammar, LazyGrammar):
            return base._masked_reasoning_ends(request)  # noqa: SLF001 -- the method that this one stands for
        grammar.is_asked_to_begin = True
        try:
            return base._masked_reasoning_ends(request)  # noqa: SLF001 -- as above
        finally:
            grammar.is_asked_to_begin = False

    def _fill_bitmasks(self, batch: Iterable[Any]) -> None:
        rows = list(batch)
        super()._fill_bitmasks(rows)
        bitmask: Any = self._grammar_bitmask
        for grammar, index, applied, *_ in rows:
            if not applied and isinstance(grammar, LazyGrammar):
                grammar.fill_free(bitmask, index)


def make_manager(base: type[StructuredOutputManager]) -> type[StructuredOutputManager]:
    """A subclass of vLLM's manager that also serves the backend named ``lazy``."""
    return type("LazyManager", (ServesLazy, base), {})


def _take_min_tokens(request: Request) -> None:
    """Keep `min_tokens` ourselves: vLLM masks the stop ids below it, also where the grammar leaves nothing else."""
    params = request.sampling_params
    if params is not None and params.min_tokens:
        request.sampling_params = copy.copy(params)  # the client's own may be the same object
        request.sampling_params.min_tokens = 0


def _grammar_of(request: Request) -> LazyGrammar:
    """The request's grammar; it is ready, or the request would not be in the batch."""
    structured: Any = request.structured_output_request
    grammar = structured._grammar  # noqa: SLF001 -- the property looks for futures, twice per step and request
    return grammar if type(grammar) is LazyGrammar else structured.grammar


def _finish(structured: Any) -> None:
    """The request has had its last token: vLLM may hold it until the next one arrives, so its end is told now."""
    if isinstance(structured.grammar, LazyGrammar):
        structured.grammar.finish()


def _has_ended(structured: Any) -> bool:
    return structured is not None and isinstance(structured.grammar, Ended)


def _has_gate(structured: Any) -> bool:
    grammar = structured.grammar
    return isinstance(grammar, LazyGrammar) and not grammar.session.trace.eager
