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
from typing import TYPE_CHECKING, Any

from vllm.v1.structured_output.request import get_structured_output_key

from vllm_lazy_grammar.adapter.client_errors import as_client_errors
from vllm_lazy_grammar.adapter.config import BACKEND, is_lazy, standing_for
from vllm_lazy_grammar.adapter.request import grammar_key, trigger_spec
from vllm_lazy_grammar.core.triggers import KEYS, Triggers, TriggerSpec
from vllm_lazy_grammar.engines import xgrammar
from vllm_lazy_grammar.errors import RequestError
from vllm_lazy_grammar.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm_lazy_grammar.core.matcher import GrammarKey
    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_REMEMBERED = 4096
"""Digests kept per engine: 32 bytes each."""

_FOREIGN_FAULTS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What vLLM's own check of a grammar may raise besides its client error; its servers would answer with status 500."""


class FrontEnd:
    """What is kept for one engine configuration. Thread-safe: one lock guards the memory and the vocabulary.

    Args:
        settings: the operator's.
        model_config: vLLM's; held weakly.
        compact: the engine's ``disable_any_whitespace``.
        eos_ids: ids that end a turn of this model unless a request says otherwise.
    """

    def __init__(self, settings: Settings, model_config: Any, *, compact: bool, eos_ids: Iterable[int] = ()) -> None:
        self.settings = settings
        self.compact = compact
        self._model_config = weakref.ref(model_config)
        self._eos_ids = frozenset(eos_ids)
        self._good: OrderedDict[bytes, None] = OrderedDict()
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
        structured = params.structured_outputs
        if structured is None:
            _refuse_without_grammar(spec)
            return
        _refuse_other_backend(structured)
        key = _key(structured, compact=self.compact)
        stop_ids = self._stop_ids(params, tokenizer)
        digest = _digest(key, spec, stop_ids)
        if not self._is_good(digest):
            self._judge(params, key, theirs)
            if spec is not None:
                self._judge_triggers(spec, key, tokenizer, stop_ids)
            self._remember(digest)
        structured._backend = BACKEND  # noqa: SLF001 -- where vLLM keeps the choice

    def _judge(self, params: Any, key: GrammarKey | None, theirs: Callable[[Any], None]) -> None:
        if key is not None:
            xgrammar.check(key)
        seen = copy.copy(params)
        seen.structured_outputs = copy.copy(params.structured_outputs)
        seen.structured_outputs._backend = None  # noqa: SLF001 -- chosen anew, on the copy
        try:
            theirs(seen)
        except _FOREIGN_FAULTS as e:
            raise RequestError("structured_outputs", _shown_source(key), f"{type(e).__name__}: {e}") from e

    def _judge_triggers(
        self, spec: TriggerSpec, key: GrammarKey | None, tokenizer: Any, stop_ids: frozenset[int]
    ) -> None:
        triggers = Triggers.compile(spec, self.vocabulary(tokenizer), stop_ids=stop_ids)
        if key is None or triggers.after:
            return
        for index, data, _ in triggers.forcible:
            if data and xgrammar.can_take(key, data, budget_ms=self.settings.frontend_check_ms) is False:
                field = f"vllm_xargs.grammar_triggers[{index}]"
                reason = "the grammar can not begin with this text; to begin it behind the trigger, set `grammar_start` to `after`"
                raise RequestError(field, str(spec.triggers[index]), reason)

    def vocabulary(self, tokenizer: Any) -> Vocabulary:
        """The vocabulary of this tokenizer as wide as the model's; built once."""
        with self._lock:
            if self._vocabulary is None or self._vocabulary[0] is not tokenizer:
                model_config = self._model_config()
                size = len(tokenizer) if model_config is None else model_config.get_vocab_size()
                self._vocabulary = tokenizer, xgrammar.vocabulary(tokenizer, size)
            return self._vocabulary[1]

    def _stop_ids(self, params: Any, tokenizer: Any) -> frozenset[int]:
        eos = () if params.ignore_eos else self._eos_ids
        own = None if params.ignore_eos else getattr(tokenizer, "eos_token_id", None)
        return frozenset(eos).union(params.stop_token_ids or (), () if own is None else (own,))

    def _is_good(self, digest: bytes) -> bool:
        with self._lock:
            known = digest in self._good
            if known:
                self._good.move_to_end(digest)
            return known

    def _remember(self, digest: bytes) -> None:
        with self._lock:
            self._good[digest] = None
            while len(self._good) > _REMEMBERED:
                self._good.popitem(last=False)


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


def _key(structured: Any, *, compact: bool) -> GrammarKey | None:
    """The grammar's key; None for ``json_object: false``, which vLLM's own check refuses."""
    if structured.json_object is False:
        return None
    try:
        option, source = get_structured_output_key(structured)
    except (RecursionError, ValueError, TypeError) as e:
        raise RequestError("structured_outputs", "...", f"is no JSON: {type(e).__name__}: {e}") from e
    return grammar_key(option.name.lower(), source, compact=compact)


def _shown_source(key: GrammarKey | None) -> str:
    return "" if key is None else key.source


def _digest(key: GrammarKey | None, spec: TriggerSpec | None, stop_ids: frozenset[int]) -> bytes:
    parts = (key, spec, sorted(stop_ids))
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).digest()


_front_ends: dict[int, FrontEnd] = {}
"""By the identity of the model configuration, which vLLM hands to every check; an entry goes with it."""


def front_end_of(model_config: Any, structured_outputs_config: Any) -> FrontEnd:
    """What is kept for this configuration; with default settings where its engine was never seen in this process."""
    known = _front_ends.get(id(model_config))
    return known or _keep(model_config, Settings(), compact=structured_outputs_config.disable_any_whitespace)


def _keep(model_config: Any, settings: Settings, *, compact: bool, eos_ids: Iterable[int] = ()) -> FrontEnd:
    made = _front_ends[id(model_config)] = FrontEnd(settings, model_config, compact=compact, eos_ids=eos_ids)
    weakref.finalize(model_config, _front_ends.pop, id(model_config), None).atexit = False
    return made


def lazy_is_served() -> bool:
    """Whether an engine of this process has our backend."""
    return bool(_front_ends)


def options_of_ours(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of a request's extra arguments that are ours."""
    return {name: value for name, value in (extra or {}).items() if name in KEYS}


def starting(current: Callable[..., None]) -> Callable[..., None]:
    """``InputProcessor.__init__`` that keeps the engine's settings for the checks, which are not given them."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 -- it replaces one
        current(self, vllm_config, *args, **kwargs)
        if not is_lazy(vllm_config):
            return
        settings = Settings.from_additional_config(vllm_config.additional_config)
        eos = self.generation_config_fields.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else () if eos is None else (eos,)
        compact = vllm_config.structured_outputs_config.disable_any_whitespace
        _keep(vllm_config.model_config, settings, compact=compact, eos_ids=eos_ids)

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


def adding(current: Callable[..., Any]) -> Callable[..., Any]:
    """``AsyncLLM.add_request`` that judges off the event loop first; the judgement on the loop then finds it remembered."""

    async def add_request(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if is_lazy(self.vllm_config) and getattr(params, "structured_outputs", None) is not None:
            tokenizer = self.input_processor.tokenizer
            config = self.vllm_config.structured_outputs_config
            check = partial(params._validate_structured_outputs, self.model_config, config, tokenizer)  # noqa: SLF001 -- our seam
            await asyncio.get_running_loop().run_in_executor(_checks, check)
        return await current(self, request_id, prompt, params, *args, **kwargs)

    return add_request
