"""What is refused although vLLM would take it and silently do something else.

Invariants:
- Nothing is refused where the engine's backend is not ours.
- A refusal of a request is a client's error (status 400) that names the field; a refusal of a start is a SettingsError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm.envs as vllm_envs

from vllm_lazy_grammar.adapter import metrics
from vllm_lazy_grammar.adapter.client_errors import as_client_errors
from vllm_lazy_grammar.adapter.config import is_lazy
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.adapter.request import OPTIONS
from vllm_lazy_grammar.errors import RequestError, SettingsError
from vllm_lazy_grammar.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_FOREIGN = frozenset({"grammar", "grammar_lazy", "preserved_tokens", *OPTIONS})
"""Fields at the top of a request's body that mean something in llama.cpp, and our options written there by mistake."""

_ELSEWHERE = frozenset({"structured_outputs", "response_format"})
"""Fields of the OpenAI API's requests, as vLLM has it, that ask for a grammar."""

_BEAM = "beam search does not obey grammars: set use_beam_search to false, or leave this out"


def options_of_ours(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of a request's extra arguments that are ours."""
    return {name: value for name, value in (extra or {}).items() if name in OPTIONS}


def refuse_in_messages(body: Mapping[str, object]) -> None:
    """RequestError where a body of ``/v1/messages`` has a field that means something to vLLM or llama.cpp elsewhere, and is dropped there."""
    for name in sorted((_FOREIGN | _ELSEWHERE) & body.keys()):
        reason = (
            "is not read here: write a schema as `output_config.format`, tools as `tools`, and options in `vllm_xargs`"
        )
        raise RequestError(name, body[name], reason)


def messages(current: Callable[..., Any]) -> Callable[..., Any]:
    """``AnthropicServingMessages.create_messages`` that refuses what its request class drops before anybody can see it."""

    async def create_messages(self: Any, request: Any, raw_request: Any = None) -> Any:
        if raw_request is not None and is_lazy(self.engine_client.vllm_config):
            with as_client_errors():
                refuse_in_messages(await raw_request.json())
        return await current(self, request, raw_request)

    return create_messages


def refuse_ignored(request: Any) -> None:
    """RequestError where a request of the OpenAI API asks for what vLLM would ignore: llama.cpp's fields, a grammar in a beam search."""
    _refuse_top_level(request.model_extra or {})
    if getattr(request, "use_beam_search", False):
        _refuse_with_beams(request)


def _refuse_top_level(extra: Mapping[str, object]) -> None:
    for name in sorted(_FOREIGN & extra.keys()):
        raise RequestError(
            name,
            extra[name],
            "is not read here: write the grammar as `structured_outputs` and the options in `vllm_xargs`",
        )


def _refuse_with_beams(request: Any) -> None:
    for name, value in options_of_ours(request.vllm_xargs).items():
        raise RequestError(f"vllm_xargs.{name}", value, _BEAM)
    if (structured := request.extract_structured_outputs()) is not None:
        raise RequestError("structured_outputs", structured, _BEAM)
    if (tools := getattr(request, "tools", None)) and request.tool_choice != "none":
        raise RequestError("tools", tools, _BEAM)


def beam_search(current: Callable[..., Any]) -> Callable[..., Any]:
    """The offline ``beam_search`` that refuses grammars where ours is the backend."""

    def search(self: Any, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if params.structured_outputs is not None and is_lazy(self.llm_engine.vllm_config):
            with as_client_errors():
                raise RequestError(
                    "structured_outputs", params.structured_outputs, "beam search does not obey lazy grammars"
                )
        return current(self, prompts, params, *args, **kwargs)

    return search


def creating_config(current: Callable[..., Any], installed: Callable[[], list[str]] = list) -> Callable[..., Any]:
    """``EngineArgs.create_engine_config`` that refuses a start that could not be served as asked, and says what was installed and set."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = current(self, *args, **kwargs)
        if is_lazy(config):
            settings = accepted_start(config)
            if settings.metrics:
                metrics.prepare()
            logger.info("Lazy grammars are on: %d names of vLLM rebound; %s", len(installed()), settings.describe())
            logger.debug("Rebound: %s", ", ".join(installed()))
        return config

    return create_engine_config


def accepted_start(config: Any) -> Settings:
    """The settings; SettingsError where one has a wrong value, or where the Rust front end would bypass every check of ours."""
    if vllm_envs.VLLM_USE_RUST_FRONTEND:
        raise SettingsError("VLLM_USE_RUST_FRONTEND", "1", "the Rust front end does not serve lazy grammars: unset it")
    return Settings.from_additional_config(config.additional_config)
