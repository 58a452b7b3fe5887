"""The seam of the engine's process: its grammars are ours."""
# ruff: noqa: PLC0415 -- vLLM, and what imports it, is imported only inside functions

from __future__ import annotations

from vllm_lazy_grammar._seams import AbstractMethods, Check, Exists, LooksUp, Parameters, Seam, Target
from vllm_lazy_grammar.plugin.names import PARAMS

_CORE = "vllm.v1.engine.core"
_MANAGER = "vllm.v1.structured_output"
_TYPES = "vllm.v1.structured_output.backend_types"
_GRAMMAR_METHODS = frozenset({"accept_tokens", "validate_tokens", "rollback", "fill_bitmask", "is_terminated", "reset"})
_BACKEND_METHODS = frozenset({"compile_grammar", "allocate_token_bitmask", "destroy"})


def engine() -> list[Seam]:
    """The engine's grammars."""
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
        Exists(Target(PARAMS, "SamplingParams.all_stop_token_ids")),
    ]
