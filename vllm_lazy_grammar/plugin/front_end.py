"""The seams that every request passes in the API server: checks, refusals, and the reason why a request ended."""
# ruff: noqa: PLC0415 -- vLLM, and what imports it, is imported only inside functions

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar._seams import Accepts, Exists, LooksUp, Parameters, Seam, Target
from vllm_lazy_grammar.plugin.names import ASYNC, CHAT, INPUT, PARAMS, RESPONSES

if TYPE_CHECKING:
    from collections.abc import Callable


_OFFLINE_BEAMS = "vllm.entrypoints.generate.beam_search.offline"
_COMPLETION = "vllm.entrypoints.openai.completion"
_MESSAGES = "vllm.entrypoints.anthropic.serving"


def requests() -> list[Seam]:
    """Requests are checked before the engine sees them."""
    from vllm_lazy_grammar.adapter import frontend

    validate = Target(PARAMS, "SamplingParams._validate_structured_outputs")
    process = Target(INPUT, "InputProcessor.process_inputs")
    add = Target(ASYNC, "AsyncLLM.add_request")
    key = Target("vllm.v1.structured_output.request", "get_structured_output_key")
    until = "vLLM has a registry of structured output backends, validation included"
    return [
        Seam(
            validate,
            frontend.validating,
            why="what can not be served is refused before the engine sees it",
            until=until,
            checks=(
                Parameters(validate, ("self", "model_config", "structured_outputs_config", "tokenizer")),
                LooksUp(Target(PARAMS, "SamplingParams.verify"), "_validate_structured_outputs"),
                LooksUp(Target(INPUT, "InputProcessor._validate_params"), "verify"),
                LooksUp(validate, "_backend_was_auto"),
                LooksUp(validate, "validate_xgrammar_grammar"),
                Parameters(key, ("params",)),
            ),
        ),
        Seam(
            process,
            frontend.processing,
            why="a grammar in a streaming-input session is refused",
            until="streaming-input sessions keep a grammar over their chunks",
            checks=(
                Accepts(process, "params"),
                Accepts(process, "resumable"),
                LooksUp(process, "_validate_params"),
                LooksUp(Target(ASYNC, "AsyncLLM._add_streaming_input_request"), "process_inputs"),
            ),
        ),
        Seam(
            add,
            frontend.adding,
            why="checking a large schema must not hold the server's event loop",
            until=until,
            checks=(
                Parameters(add, ("self", "request_id", "prompt", "params")),
                LooksUp(Target(ASYNC, "AsyncLLM.generate"), "add_request"),
                LooksUp(add, "input_processor"),
            ),
        ),
    ]


def faults() -> list[Seam]:
    """The client is told why its request ended."""
    from vllm_lazy_grammar.adapter import client_errors

    generate = Target(ASYNC, "AsyncLLM.generate")
    update = Target("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output")
    until = "vLLM carries a message with a request that its engine ends"
    return [
        Seam(
            generate,
            client_errors.generating,
            why="the client is told why the engine ended its request; the reason travels in `stop_reason`",
            until=until,
            checks=(
                Parameters(generate, ("self", "prompt", "sampling_params", "request_id")),
                LooksUp(update, "stop_reason"),
                LooksUp(update, "accept_tokens"),
                LooksUp(update, "FINISHED_ERROR"),
                Exists(Target("vllm.v1.engine", "EngineCoreOutput.stop_reason")),
                LooksUp(Target("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs"), "stop_reason"),
                *(LooksUp(Target(f"{package}.serving", caller), "generate") for package, caller in _GENERATING),
            ),
        ),
    ]


_GENERATING = (
    (CHAT, "OpenAIServingChat._create_chat_completion"),
    (_COMPLETION, "OpenAIServingCompletion._create_completion"),
)


def servers() -> list[Seam]:
    """What the API's routes would drop or answer in silence is refused."""
    from vllm_lazy_grammar.adapter import frontend, refusals

    render = frontend.rendering
    offline = Target(_OFFLINE_BEAMS, "BeamSearchOfflineMixin.beam_search")
    messages = Target(_MESSAGES, "AnthropicServingMessages.create_messages")
    chat, completion, responses = "OpenAIServingChat", "OpenAIServingCompletion", "OpenAIServingResponses"
    return [
        _rendering(render, CHAT, f"{chat}.render_chat_request", f"{chat}._create_chat_completion"),
        _rendering(render, _COMPLETION, f"{completion}.render_completion_request", f"{completion}._create_completion"),
        _rendering(
            render, RESPONSES, f"{responses}._render_resolved_response_inputs", f"{responses}._create_responses"
        ),
        Seam(
            messages,
            refusals.messages,
            why="fields that ask for a grammar in other APIs are a 400 here, since the request's class drops them",
            until="vLLM refuses fields that it does not know",
            checks=(
                Parameters(messages, ("self", "request", "raw_request")),
                LooksUp(Target("vllm.entrypoints.anthropic.api_router", "create_messages"), "create_messages"),
                LooksUp(
                    Target("vllm.entrypoints.generate.base.serving", "GenerateBaseServing.__init__"), "engine_client"
                ),
            ),
        ),
        Seam(
            offline,
            refusals.beam_search,
            why="beam search with a lazy grammar is refused",
            until="vLLM's beam search asks the configured backend",
            checks=(Parameters(offline, ("self", "prompts", "params")), LooksUp(offline, "llm_engine")),
        ),
    ]


_REQUESTS = {CHAT: "ChatCompletionRequest", _COMPLETION: "CompletionRequest", RESPONSES: "ResponsesRequest"}
_FIELDS = ("vllm_xargs", "stop_token_ids", "ignore_eos")


def _rendering(replace: Callable[[Any], Any], package: str, method: str, caller: str) -> Seam:
    """The seam at the method that renders a request of the OpenAI API; `caller` awaits it before it answers anything."""
    target = Target(f"{package}.serving", method)
    request = _REQUESTS[package]
    beams = () if package == RESPONSES else ("use_beam_search",)
    return Seam(
        target,
        replace,
        why="what can not be served is a 400 in a streamed request too; llama.cpp's fields and beam search with a grammar are refused",
        until="vLLM validates a request before a streamed answer begins, and refuses what it would ignore",
        checks=(
            Parameters(target, ("self", "request")),
            LooksUp(Target(f"{package}.serving", caller), target.path.rpartition(".")[2]),
            LooksUp(Target(f"{package}.serving", caller), "model_config"),
            Exists(Target(f"{package}.protocol", f"{request}.extract_structured_outputs")),
            *(Exists(Target(f"{package}.protocol", f"{request}.__pydantic_fields__[{f}]")) for f in (*_FIELDS, *beams)),
        ),
    )
