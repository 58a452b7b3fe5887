"""The table of seams: every name of vLLM that is rebound, why, until when, and what that relies on.

Invariants:
- Importing this module imports neither vllm nor torch nor xgrammar.
- After `register` every seam is bound, or none and SeamError was raised; `register` any number of times is once.
- No version of vLLM is compared anywhere: the checks decide.
"""
# ruff: noqa: PLC0415 -- vLLM, and what imports it, is imported only inside functions: the first invariant

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar._seams import (
    AbstractMethods,
    Accepts,
    Check,
    Exists,
    LooksUp,
    Offers,
    Parameters,
    Seam,
    Table,
    Target,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm import SamplingParams

TESTED = "vLLM 0.32.0 and 0.33.0"
WAYS_OUT = (
    "install a vLLM that it was tested with: pip install 'vllm>=0.32,<0.34'",
    "install a newer vllm-lazy-grammar",
    "run vLLM without it: uninstall vllm-lazy-grammar, or set VLLM_PLUGINS to the other plugins that you use (empty for none)",
)

_CONFIG = "vllm.config.structured_outputs"
_PARSER = "vllm.utils.argparse_utils"
_ARGS = "vllm.engine.arg_utils"
_CORE = "vllm.v1.engine.core"
_MANAGER = "vllm.v1.structured_output"
_TYPES = "vllm.v1.structured_output.backend_types"
_PARAMS = "vllm.sampling_params"
_INPUT = "vllm.v1.engine.input_processor"
_ASYNC = "vllm.v1.engine.async_llm"
_OFFLINE_BEAMS = "vllm.entrypoints.generate.beam_search.offline"
_CHAT = "vllm.entrypoints.openai.chat_completion"
_COMPLETION = "vllm.entrypoints.openai.completion"
_RESPONSES = "vllm.entrypoints.openai.responses"
_MESSAGES = "vllm.entrypoints.anthropic.serving"
_RENDERER = "vllm.renderers.online_renderer"
_MAIN = "vllm.entrypoints.cli.main"
_PARSE = "vllm.parser.abstract_parser"
_DELTA = ("delta_text", "delta_token_ids")

_GRAMMAR_METHODS = frozenset({"accept_tokens", "validate_tokens", "rollback", "fill_bitmask", "is_terminated", "reset"})
_BACKEND_METHODS = frozenset({"compile_grammar", "allocate_token_bitmask", "destroy"})


def register() -> None:
    """Bind every seam in this process; the entry point that vLLM calls. SeamError, and nothing bound, where vLLM does not fit."""
    table().install()


def unregister() -> None:
    """Restore every name. SeamError, and nothing restored, where somebody has rebound one since."""
    table().uninstall()


def sampling_params(grammar: Any, **options: Any) -> SamplingParams:
    """Make vLLM's SamplingParams for the offline ``LLM``, with this grammar.

    Args:
        grammar: a `LazyGrammar`: what to hold the output to, and when.
        options: any other of SamplingParams' arguments; ``extra_args`` of other plugins are kept.
    """
    from vllm_lazy_grammar.adapter import offline

    return offline.sampling_params(grammar, options)


def facts() -> list[str]:
    """What the checks look at in the vLLM that is installed, one line each, in a stable order."""
    return table().facts()


@functools.cache
def table() -> Table:
    """The one table of this process."""
    seams = (
        *_llvm(),
        *_engine(),
        *_config(),
        *_command_line(),
        *_start(),
        *_requests(),
        *_faults(),
        *_servers(),
        *_tools(),
        *_finish(),
    )
    return Table(seams, version=vllm_version, tested=f"tested with {TESTED}", ways_out=WAYS_OUT)


def vllm_version() -> str:
    """Name and version of the vLLM that is installed. ImportError where there is none."""
    from vllm.version import __version__

    return f"vLLM {__version__}"


def _engine() -> list[Seam]:
    from vllm_lazy_grammar.adapter.manager import make_manager

    manager = Target(_MANAGER, "StructuredOutputManager")
    return [
        Seam(
            Target(_CORE, "StructuredOutputManager"),
            make_manager,
            why="the engine's grammars are ours",
            until="vLLM has a registry of structured output backends",
            checks=(
                LooksUp(Target(_CORE, "EngineCore.__init__"), "StructuredOutputManager"),
                LooksUp(Target(_CORE, "EngineCore.__init__"), "load_general_plugins"),
                LooksUp(Target(_CORE, "EngineCore.preprocess_add_request"), "grammar_init"),
                *_methods(manager),
                AbstractMethods(Target(_TYPES, "StructuredOutputGrammar"), _GRAMMAR_METHODS),
                AbstractMethods(Target(_TYPES, "StructuredOutputBackend"), _BACKEND_METHODS),
            ),
        )
    ]


def _methods(manager: Target) -> list[Check]:
    def method(name: str) -> Target:
        return Target(manager.module, f"{manager.path}.{name}")

    return [
        Parameters(method("__init__"), ("self", "vllm_config")),
        Parameters(method("grammar_init"), ("self", "request")),
        Parameters(method("_fill_bitmasks"), ("self", "batch")),
        Parameters(method("_get_constraint_bounds"), ("self", "request", "spec_tokens", "spec_tokens_committed")),
        Parameters(method("accept_tokens"), ("self", "request", "new_token_ids")),
        Parameters(
            method("grammar_bitmask"),
            ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
        ),
        LooksUp(method("accept_tokens"), "_get_constraint_bounds"),
        Parameters(method("validate_tokens"), ("self", "request", "spec_tokens")),
        LooksUp(method("grammar_bitmask"), "_fill_bitmasks"),
        LooksUp(method("_fill_bitmasks"), "fill_bitmask"),
        LooksUp(method("_fill_bitmasks"), "_grammar_bitmask"),
        *(
            LooksUp(method("__init__"), name)
            for name in ("backend", "tokenizer", "vllm_config", "_use_async_grammar_compilation")
        ),
        Exists(Target("vllm.v1.structured_output.request", "StructuredOutputRequest.structured_output_key")),
        Exists(Target("vllm.v1.structured_output.request", "StructuredOutputRequest.grammar")),
        Exists(Target(_PARAMS, "SamplingParams.all_stop_token_ids")),
    ]


def _config() -> list[Seam]:
    from vllm_lazy_grammar.adapter import config

    validator = "_validate_structured_output_config"
    held = f"StructuredOutputsConfig.__pydantic_decorators__.model_validators[{validator}].func"
    shared: dict[str, Any] = {
        "why": "`lazy` is a backend that the configuration takes",
        "until": "vLLM takes the names of registered backends",
        "settle": config.rebuild_schemas,
    }
    names = Target(_CONFIG, "StructuredOutputsBackend")
    field = Target(_CONFIG, "StructuredOutputsConfig.__dataclass_fields__[backend].type")
    return [
        Seam(names, config.with_lazy, checks=(Offers(names, config.STANDS_FOR),), **shared),
        Seam(field, config.with_lazy, checks=(Offers(field, config.STANDS_FOR),), **shared),
        Seam(
            Target(_CONFIG, held),
            config.validating_config,
            checks=(Parameters(Target(_CONFIG, held), ("self",)), Exists(Target("vllm.config.vllm", "VllmConfig"))),
            **shared,
        ),
    ]


def _command_line() -> list[Seam]:
    from vllm_lazy_grammar.adapter import cli_flags

    parse = Target(_PARSER, "FlexibleArgumentParser.parse_args")
    load = Target(_PARSER, "FlexibleArgumentParser.load_config_file")
    add = Target(_ARGS, "EngineArgs.add_cli_args")
    add_async = Target(_ARGS, "AsyncEngineArgs.add_cli_args")
    shared: dict[str, Any] = {
        "why": f"{cli_flags.FLAG} names the backend",
        "until": "vLLM lets plugins add flags before it parses",
    }
    parsed = Parameters(parse, ("self", "args", "namespace")), LooksUp(Target(_MAIN, "main"), "parse_args")
    loaded = (
        Parameters(load, ("self", "file_path")),
        LooksUp(Target(_PARSER, "FlexibleArgumentParser._pull_args_from_config"), "load_config_file"),
    )
    added = (
        Parameters(add, ("parser",)),
        LooksUp(add_async, "EngineArgs"),
        LooksUp(add_async, "load_general_plugins"),
    )
    return [
        Seam(parse, cli_flags.parsing, checks=parsed, **shared),
        Seam(load, cli_flags.reading_file, checks=loaded, **shared),
        Seam(add, cli_flags.adding_flags, checks=added, **shared),
    ]


def _start() -> list[Seam]:
    from vllm_lazy_grammar.adapter import frontend, refusals

    create = Target(_ARGS, "EngineArgs.create_engine_config")
    init = Target(_INPUT, "InputProcessor.__init__")
    return [
        Seam(
            create,
            functools.partial(refusals.creating_config, installed=lambda: table().targets),
            why="a start that could not be served as asked is refused",
            until="vLLM lets plugins validate the configuration",
            checks=(
                Exists(Target("vllm.config.vllm", "VllmConfig.__dataclass_fields__[additional_config]")),
                Exists(Target("vllm.envs", "environment_variables[VLLM_USE_RUST_FRONTEND]")),
                LooksUp(Target("vllm.entrypoints.launchers.api_server.entry", _ENTRY), "create_engine_config"),
                LooksUp(Target("vllm.v1.engine.llm_engine", "LLMEngine.from_engine_args"), "create_engine_config"),
            ),
        ),
        Seam(
            init,
            frontend.starting,
            why="the checks of requests need the settings, and are given the model's configuration only",
            until="vLLM hands its engine configuration to a backend's validation",
            checks=(
                Parameters(init, ("self", "vllm_config")),
                LooksUp(Target(_ASYNC, "AsyncLLM.__init__"), "InputProcessor"),
                LooksUp(Target("vllm.v1.engine.llm_engine", "LLMEngine.__init__"), "InputProcessor"),
                LooksUp(init, "generation_config_fields"),
            ),
        ),
    ]


_ENTRY = "build_async_engine_client_from_engine_args"


def _requests() -> list[Seam]:
    from vllm_lazy_grammar.adapter import frontend

    validate = Target(_PARAMS, "SamplingParams._validate_structured_outputs")
    process = Target(_INPUT, "InputProcessor.process_inputs")
    add = Target(_ASYNC, "AsyncLLM.add_request")
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
                LooksUp(Target(_PARAMS, "SamplingParams.verify"), "_validate_structured_outputs"),
                LooksUp(Target(_INPUT, "InputProcessor._validate_params"), "verify"),
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
                LooksUp(Target(_ASYNC, "AsyncLLM._add_streaming_input_request"), "process_inputs"),
            ),
        ),
        Seam(
            add,
            frontend.adding,
            why="checking a large schema must not hold the server's event loop",
            until=until,
            checks=(
                Parameters(add, ("self", "request_id", "prompt", "params")),
                LooksUp(Target(_ASYNC, "AsyncLLM.generate"), "add_request"),
                LooksUp(add, "input_processor"),
            ),
        ),
    ]


def _faults() -> list[Seam]:
    from vllm_lazy_grammar.adapter import client_errors

    generate = Target(_ASYNC, "AsyncLLM.generate")
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
    (_CHAT, "OpenAIServingChat._create_chat_completion"),
    (_COMPLETION, "OpenAIServingCompletion._create_completion"),
)


def _servers() -> list[Seam]:
    from vllm_lazy_grammar.adapter import frontend, refusals

    render = frontend.rendering
    offline = Target(_OFFLINE_BEAMS, "BeamSearchOfflineMixin.beam_search")
    messages = Target(_MESSAGES, "AnthropicServingMessages.create_messages")
    chat, completion, responses = "OpenAIServingChat", "OpenAIServingCompletion", "OpenAIServingResponses"
    return [
        _rendering(render, _CHAT, f"{chat}.render_chat_request", f"{chat}._create_chat_completion"),
        _rendering(render, _COMPLETION, f"{completion}.render_completion_request", f"{completion}._create_completion"),
        _rendering(
            render, _RESPONSES, f"{responses}._render_resolved_response_inputs", f"{responses}._create_responses"
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


def _tools() -> list[Seam]:
    from vllm_lazy_grammar.adapter import tool_parsers

    get = Target("vllm.parser.parser_manager", "ParserManager.get_parser")
    parser = "DelegatingParser.{}"
    looks = (
        (_RENDERER, "OnlineRenderer.__init__", "get_parser"),
        (f"{_CHAT}.serving", "OpenAIServingChat.__init__", "get_parser"),
        (f"{_RESPONSES}.serving", "OpenAIServingResponses.__init__", "get_parser"),
        (_RENDERER, "OnlineRenderer.preprocess_chat", "always_adjust_request"),
        (_RENDERER, "OnlineRenderer.preprocess_chat", "adjust_request"),
        (_PARSE, parser.format("adjust_request"), "_apply_structural_tag"),
        (_PARSE, parser.format("_extract_tool_calls"), "supports_required_and_named"),
        (_PARSE, parser.format("_extract_tool_calls_streaming"), "supports_required_and_named"),
    )
    return [
        Seam(
            get,
            tool_parsers.getting_parser,
            why="requests with tools get a grammar that waits for the call",
            until="vLLM's tool parsers ask the structured output backend for their grammar",
            checks=(
                *(Accepts(get, name) for name in ("model_name", "tool_parser_name", "is_harmony", "tokenizer")),
                *(LooksUp(Target(module, path), name) for module, path, name in looks),
                Parameters(Target(_PARSE, parser.format("parse")), ("self", "model_output", "request")),
                Parameters(Target(_PARSE, parser.format("parse_delta")), ("self", *_DELTA, "request")),
                Parameters(Target("vllm.tool_parsers.utils", "get_function_tools"), ("tools",)),
                Parameters(Target(_PARSE, "structured_outputs_to_format"), ("params",)),
            ),
        )
    ]


def _finish() -> list[Seam]:
    from vllm_lazy_grammar.adapter import finish

    def seam(name: str, *fields: str) -> Seam:
        made = Target(f"{_CHAT}.protocol", name)
        return Seam(
            Target(f"{_CHAT}.serving", name),
            finish.choosing,
            why="`tool_calls` is the finish reason of no answer without a call, nor of one that a stop string cut",
            until="that is so in vLLM",
            checks=(
                LooksUp(Target(f"{_CHAT}.serving", "OpenAIServingChat"), name),
                *(Exists(Target(made.module, f"{made.path}.__pydantic_fields__[{field}]")) for field in fields),
            ),
        )

    return [
        seam("ChatCompletionResponseChoice", "finish_reason", "stop_reason", "message"),
        seam("ChatCompletionResponseStreamChoice", "finish_reason", "stop_reason"),
    ]


_REQUESTS = {_CHAT: "ChatCompletionRequest", _COMPLETION: "CompletionRequest", _RESPONSES: "ResponsesRequest"}
_FIELDS = ("vllm_xargs", "stop_token_ids", "ignore_eos")


def _rendering(replace: Callable[[Any], Any], package: str, method: str, caller: str) -> Seam:
    """The seam at the method that renders a request of the OpenAI API; `caller` awaits it before it answers anything."""
    target = Target(f"{package}.serving", method)
    request = _REQUESTS[package]
    beams = () if package == _RESPONSES else ("use_beam_search",)
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


def _llvm() -> list[Seam]:
    """Numba's binding of LLVM answers to every attribute, `__dict__` included; vLLM's CPU worker, which looks through the namespaces of all
    loaded modules when it starts, then fails. Where this version of it does not answer so, nothing needs mending.
    """  # noqa: D205 -- one thought
    from llvmlite.binding import ffi

    if not hasattr(ffi.lib, "__dict__"):
        return []
    return [
        Seam(
            Target("llvmlite.binding.ffi", "_lib_wrapper.__getattr__"),
            _functions_only,
            why="vLLM's CPU worker starts although numba was imported before it",
            until="vLLM's scan for kernels passes over objects that only pretend to have a `__dict__`",
            checks=(Parameters(Target("llvmlite.binding.ffi", "_lib_wrapper.__getattr__"), ("self", "name")),),
        )
    ]


def _functions_only(current: Any) -> Any:
    @functools.wraps(current)
    def getattr_(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return current(self, name)

    return getattr_
