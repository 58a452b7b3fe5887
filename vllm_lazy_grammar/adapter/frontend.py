"""The API server's side: a request is judged before the engine sees it.

Invariants:
- A request that does not choose our backend is judged by vLLM's own code, with the arguments it was given.
- A request that passes is changed in nothing but its choice of backend, so it may be used again.
- What was found good is remembered by a digest and not judged again; what was refused is not remembered.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.request import get_structured_output_key

from vllm_lazy_grammar.adapter import metrics
from vllm_lazy_grammar.adapter.client_errors import as_client_errors
from vllm_lazy_grammar.adapter.config import BACKEND, is_lazy, standing_for
from vllm_lazy_grammar.adapter.reasoning import end_marker, refuse_unseen
from vllm_lazy_grammar.adapter.refusals import options_of_ours, refuse_ignored
from vllm_lazy_grammar.adapter.request import TRACE, grammar_key, trigger_spec
from vllm_lazy_grammar.core.triggers import Triggers, TriggerSpec
from vllm_lazy_grammar.core.xargs import PREFIX, read_bool
from vllm_lazy_grammar.engines import policy, xgrammar_vocabulary
from vllm_lazy_grammar.engines.policy import Choice
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_lazy_grammar.adapter.tool_calls import ToolCalls
    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

T = TypeVar("T")

_REMEMBERED = 4096
"""Digests kept per engine: 32 bytes each."""

_FOREIGN_FAULTS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What vLLM's own check of a grammar may raise besides its client error; its servers would answer with status 500."""


class FrontEnd:
    """What is kept for one engine configuration. Thread-safe: one lock guards the memory and the vocabulary.

    Args:
        settings: the operator's.
        model_config: vLLM's; held weakly.
        config: vLLM's configuration of structured outputs.
        eos_ids: ids that end a turn of this model unless a request says otherwise.
    """

    def __init__(self, settings: Settings, model_config: Any, config: Any, eos_ids: Iterable[int] = ()) -> None:
        self.settings = settings
        self.choice = Choice(settings.engine, settings.relax)
        self.config = config
        self._model_config = weakref.ref(model_config)
        self._eos_ids = frozenset(eos_ids)
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._made: OrderedDict[bytes, None] = OrderedDict()
        self._vocabulary: tuple[Any, Vocabulary] | None = None
        self._lock = threading.Lock()

    def check(self, params: Any, tokenizer: Any, theirs: Callable[[Any], None]) -> None:
        """Judge a request and choose our backend for it.

        Args:
            params: vLLM's SamplingParams.
            tokenizer: vLLM's, or None where it was left out.
            theirs: vLLM's own check; may change what it is given, raises its client error.

        Raises:
            RequestError: the request can not be served.
        """
        spec = trigger_spec(params)
        self._refuse_untraceable(params)
        structured = params.structured_outputs
        if structured is None:
            _refuse_without_grammar(spec)
            return
        _refuse_other_backend(structured)
        key = _key(structured, self._grammar_key)
        made = key is not None and self._is_made(key)
        self.once((key, made), partial(self._judge, params, key, None if made else theirs))
        if spec is not None:
            stop_ids = self._stop_ids(params, tokenizer)
            judge = partial(self._judge_triggers, spec, None if made else key, tokenizer, stop_ids)
            self.once((key, spec, sorted(stop_ids), made), judge)
        structured._backend = BACKEND  # noqa: SLF001 -- where vLLM keeps the choice

    def _refuse_untraceable(self, params: Any) -> None:
        if not read_bool(params.extra_args or {}, TRACE):
            return
        if not self.settings.trace_dir:
            raise RequestError(PREFIX + TRACE, 1, "this server writes no traces: its setting trace_dir names no folder")
        if params.structured_outputs is None:
            raise RequestError(PREFIX + TRACE, 1, "there is no grammar to trace: add `structured_outputs` or tools")

    def vouch(self, key: GrammarKey) -> None:
        """Note that we made this grammar ourselves, for triggers of ours: vLLM's own check does not know all that stands in it."""
        with self._lock:
            _keep_newest(self._made, _digest((self._grammar_key(key.kind, key.source),)))

    def _grammar_key(self, kind: str, source: str) -> GrammarKey:
        undeclared = self.settings.undeclared_properties == "allow"
        return grammar_key(kind, source, compact=self.config.disable_any_whitespace, undeclared=undeclared)

    def _is_made(self, key: GrammarKey) -> bool:
        with self._lock:
            return _digest((key,)) in self._made

    def _judge(self, params: Any, key: GrammarKey | None, theirs: Callable[[Any], None] | None) -> None:
        engine = policy.XGRAMMAR if key is None else policy.check(key, self.choice)
        if theirs is None or engine != policy.XGRAMMAR:  # theirs knows what xgrammar can not do, and no other engine
            return
        seen = copy.copy(params)
        seen.structured_outputs = copy.copy(params.structured_outputs)
        seen.structured_outputs._backend = None  # noqa: SLF001 -- chosen anew, on the copy
        try:
            theirs(seen)
        except VLLMValidationError as e:
            if e.parameter is not None or key is None:
                raise
            raise RequestError(f"structured_outputs.{key.kind}", key.source, str(e)) from e
        except _FOREIGN_FAULTS as e:
            raise RequestError("structured_outputs", _shown_source(key), f"{type(e).__name__}: {e}") from e

    def _judge_triggers(
        self, spec: TriggerSpec, key: GrammarKey | None, tokenizer: Any, stop_ids: frozenset[int]
    ) -> None:
        vocabulary = self.vocabulary(tokenizer)
        triggers = Triggers.compile(spec, vocabulary, stop_ids=stop_ids)
        refuse_unseen(triggers, end_marker(self.config, tokenizer), vocabulary)
        if key is None or triggers.after:
            return
        for index, data, _ in triggers.forcible:
            if data and self._is_refused(key, data):
                field = f"vllm_xargs.grammar_triggers[{index}]"
                reason = "the grammar can not begin with this text; to begin it behind the trigger, set `grammar_start` to `after`"
                raise RequestError(field, str(spec.triggers[index]), reason)

    def _is_refused(self, key: GrammarKey, data: bytes) -> bool:
        return policy.can_take(key, data, self.choice, budget_ms=self.settings.frontend_check_ms) is False

    def vocabulary(self, tokenizer: Any) -> Vocabulary:
        """The vocabulary of this tokenizer as wide as the model's; built once."""
        with self._lock:
            if self._vocabulary is None or self._vocabulary[0] is not tokenizer:
                model_config = self._model_config()
                size = len(tokenizer) if model_config is None else model_config.get_vocab_size()
                self._vocabulary = tokenizer, xgrammar_vocabulary.vocabulary(tokenizer, size)
            return self._vocabulary[1]

    def _stop_ids(self, params: Any, tokenizer: Any) -> frozenset[int]:
        eos = () if params.ignore_eos else self._eos_ids
        own = None if params.ignore_eos else getattr(tokenizer, "eos_token_id", None)
        return frozenset(eos).union(params.stop_token_ids or (), () if own is None else (own,))

    @property
    def model_name(self) -> str | None:
        """What the operator called the model; None once its configuration is gone."""
        model_config = self._model_config()
        return None if model_config is None else getattr(model_config, "model", None)

    def once(self, what: object, judge: Callable[[], None]) -> None:
        """Judge what is not known to be good; two threads may judge the same at once."""
        digest = _digest(what)
        with self._lock:
            if digest in self._good:
                self._good.move_to_end(digest)
                return
        judge()
        with self._lock:
            _keep_newest(self._good, digest)


def _digest(what: object) -> bytes:
    return hashlib.sha256(repr(what).encode(errors="surrogatepass")).digest()


def _keep_newest(digests: OrderedDict[bytes, None], digest: bytes) -> None:
    digests[digest] = None
    digests.move_to_end(digest)
    while len(digests) > _REMEMBERED:
        digests.popitem(last=False)


def _refuse_without_grammar(spec: TriggerSpec | None) -> None:
    if spec is not None:
        reason = "there is no grammar for them to start: add `structured_outputs` or a `response_format`"
        raise RequestError("vllm_xargs.grammar_triggers", [str(t) for t in spec.triggers], reason)


def _refuse_other_backend(structured: Any) -> None:
    asked = structured._backend  # noqa: SLF001 -- where vLLM keeps the choice
    if asked not in (None, BACKEND) and not structured._backend_was_auto:  # noqa: SLF001 -- the same
        raise RequestError(
            "structured_outputs._backend", asked, f"a request can not choose; the server's backend is {BACKEND!r}"
        )


def _key(structured: Any, key_of: Callable[[str, str], GrammarKey]) -> GrammarKey | None:
    """The grammar's key; None for ``json_object: false``, which vLLM's own check refuses."""
    if structured.json_object is False:
        return None
    try:
        option, source = get_structured_output_key(structured)
    except (RecursionError, ValueError, TypeError) as e:
        raise RequestError("structured_outputs", "...", f"is no JSON: {type(e).__name__}: {e}") from e
    return key_of(option.name.lower(), source)


def _shown_source(key: GrammarKey | None) -> str:
    return "" if key is None else key.source


_front_ends: dict[int, FrontEnd] = {}
"""By the identity of the model configuration, which vLLM hands to every check; an entry goes with it."""


def front_end_of(model_config: Any, config: Any) -> FrontEnd:
    """What is kept for this model; with default settings where its engine was never seen in this process."""
    return known_front_end(model_config) or _keep(Settings(), model_config, config)


def known_front_end(model_config: Any) -> FrontEnd | None:
    """What is kept for this model, where its engine has our backend and was seen in this process."""
    return _front_ends.get(id(model_config))


def front_end_of_name(model_name: str | None) -> FrontEnd | None:
    """The same, by the name that the operator gave the model."""
    found = (each for each in list(_front_ends.values()) if model_name is not None and each.model_name == model_name)
    return next(found, None)


def serves_here() -> bool:
    """Whether an engine that was seen in this process has our backend."""
    return bool(_front_ends)


def _keep(settings: Settings, model_config: Any, config: Any, eos_ids: Iterable[int] = ()) -> FrontEnd:
    made = _front_ends[id(model_config)] = FrontEnd(settings, model_config, config, eos_ids)
    weakref.finalize(model_config, _front_ends.pop, id(model_config), None).atexit = False
    return made


def starting(current: Callable[..., None]) -> Callable[..., None]:
    """``InputProcessor.__init__`` that keeps the engine's settings for the checks, which are not given them."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 -- it replaces one
        current(self, vllm_config, *args, **kwargs)
        if not is_lazy(vllm_config):
            return
        settings = Settings.from_additional_config(vllm_config.additional_config)
        Choice(settings.engine).require()
        if settings.metrics:
            metrics.serve()
        eos = self.generation_config_fields.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else () if eos is None else (eos,)
        _keep(settings, vllm_config.model_config, vllm_config.structured_outputs_config, eos_ids)

    return __init__


def processing(current: Callable[..., Any]) -> Callable[..., Any]:
    """``InputProcessor.process_inputs`` that refuses a grammar in a streaming-input session."""
    signature = inspect.signature(current)

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_lazy(self.vllm_config):
            given = signature.bind(self, *args, **kwargs).arguments
            if given.get("resumable"):
                with as_client_errors():
                    _refuse_streaming_input(given["params"])
        return current(self, *args, **kwargs)

    return process_inputs


def _refuse_streaming_input(params: Any) -> None:
    reason = "a session whose input is streamed can not have a grammar"
    for name, value in options_of_ours(getattr(params, "extra_args", None)).items():
        raise RequestError(f"vllm_xargs.{name}", value, reason)
    if (structured := getattr(params, "structured_outputs", None)) is not None:
        raise RequestError("structured_outputs", structured, reason)


def validating(current: Callable[..., None]) -> Callable[..., None]:
    """``SamplingParams._validate_structured_outputs`` that judges the requests of our backend."""

    def _validate_structured_outputs(
        self: Any, model_config: Any, structured_outputs_config: Any, tokenizer: Any
    ) -> None:
        with as_client_errors():
            config = structured_outputs_config
            if config is None or config.backend != BACKEND:
                _refuse_unserved(self)
                current(self, model_config, config, tokenizer)
                return
            theirs = partial(_judged_by, current, model_config, standing_for(config), tokenizer)
            front_end_of(model_config, config).check(self, tokenizer, theirs)

    return _validate_structured_outputs


def _judged_by(current: Callable[..., None], model_config: Any, config: Any, tokenizer: Any, params: Any) -> None:
    current(params, model_config, config, tokenizer)


def _refuse_unserved(params: Any) -> None:
    for name, value in options_of_ours(params.extra_args).items():
        raise RequestError(f"vllm_xargs.{name}", value, f"is served by `--guided-decoding-backend {BACKEND}` only")


_checks = ThreadPoolExecutor(2, thread_name_prefix="lazy-grammar-check")
"""Checks run here, so that a large schema does not hold the server's event loop; threads start with the first one."""


async def judge_off_loop(params: Any, model_config: Any, config: Any, tokenizer: Any) -> None:
    """Judge SamplingParams on another thread; the judgement that vLLM asks for later, on the event loop, finds it remembered."""
    await _off_loop(partial(params._validate_structured_outputs, model_config, config, tokenizer))  # noqa: SLF001 -- our seam


async def _off_loop(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_checks, work)


def adding(current: Callable[..., Any]) -> Callable[..., Any]:
    """``AsyncLLM.add_request`` that judges a grammar off the event loop first."""

    async def add_request(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if is_lazy(self.vllm_config) and getattr(params, "structured_outputs", None) is not None:
            config = self.vllm_config.structured_outputs_config
            await judge_off_loop(params, self.model_config, config, self.input_processor.tokenizer)
        return await current(self, request_id, prompt, params, *args, **kwargs)

    return add_request


def served_calls(serving: Any) -> ToolCalls | None:
    """What a serving class does for tools; None where it leaves them to vLLM."""
    parser = getattr(getattr(serving, "online_renderer", None), "parser", None)
    return getattr(parser, "lazy_calls", None)


def rendering(current: Callable[..., Any]) -> Callable[..., Any]:
    """A serving class's method that renders a request's prompt: refuses what vLLM would ignore, and judges the grammar.

    Here, since a streamed answer has begun, with status 200, when the engine's client judges.
    """

    async def render(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        front_end = known_front_end(self.model_config)
        if front_end is None:
            return await current(self, request, *args, **kwargs)
        with as_client_errors():
            refuse_ignored(request)
            if getattr(request, "tools", None) and (calls := served_calls(self)) is not None:
                calls.keep(request, await _off_loop(partial(calls.made, request)))
        result = await current(self, request, *args, **kwargs)
        structured = request.extract_structured_outputs()
        if structured is not None or request.vllm_xargs:
            params = SamplingParams(
                structured_outputs=structured,
                extra_args=request.vllm_xargs,
                stop_token_ids=request.stop_token_ids,
                ignore_eos=request.ignore_eos,
            )
            await judge_off_loop(params, self.model_config, front_end.config, self.renderer.tokenizer)
        return result

    return render
