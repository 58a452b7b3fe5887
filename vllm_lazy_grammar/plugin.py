"""The table of seams: every name of vLLM that is rebound, why, until when, and what that relies on.

Invariants:
- Importing this module imports neither vllm nor torch nor xgrammar.
- After `register` every seam is bound, or none and SeamError was raised; `register` any number of times is once.
- No version of vLLM is compared anywhere: the checks decide.
"""
# ruff: noqa: PLC0415 -- vLLM, and what imports it, is imported only inside functions: the first invariant

from __future__ import annotations

import functools
from typing import Any

from vllm_lazy_grammar._seams import (
    AbstractMethods,
    Check,
    Exists,
    LooksUp,
    Offers,
    Parameters,
    Seam,
    Table,
    Target,
)

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

_GRAMMAR_METHODS = frozenset({"accept_tokens", "validate_tokens", "rollback", "fill_bitmask", "is_terminated", "reset"})
_BACKEND_METHODS = frozenset({"compile_grammar", "allocate_token_bitmask", "destroy"})


def register() -> None:
    """Bind every seam in this process; the entry point that vLLM calls. SeamError, and nothing bound, where vLLM does not fit."""
    if table().install():
        _log().debug("lazy grammars: %d names of vLLM rebound: %s", len(table().targets), ", ".join(table().targets))


def unregister() -> None:
    """Restore every name. SeamError, and nothing restored, where somebody has rebound one since."""
    table().uninstall()


def facts() -> list[str]:
    """What the checks look at in the vLLM that is installed, one line each, in a stable order."""
    return table().facts()


@functools.cache
def table() -> Table:
    """The one table of this process."""
    seams = (*_engine(), *_config(), *_command_line())
    return Table(seams, version=_version, tested=f"tested with {TESTED}", ways_out=WAYS_OUT)


def _version() -> str:
    from vllm.version import __version__

    return f"vLLM {__version__}"


def _log() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.lazy_grammar")


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
        Parameters(method("validate_tokens"), ("self", "request", "spec_tokens")),
        LooksUp(method("grammar_bitmask"), "_fill_bitmasks"),
        LooksUp(method("_fill_bitmasks"), "fill_bitmask"),
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
    return [
        Seam(
            parse,
            cli_flags.parsing,
            checks=(
                Parameters(parse, ("self", "args", "namespace")),
                LooksUp(Target("vllm.entrypoints.cli.main", "main"), "parse_args"),
            ),
            **shared,
        ),
        Seam(
            load,
            cli_flags.reading_file,
            checks=(
                Parameters(load, ("self", "file_path")),
                LooksUp(Target(_PARSER, "FlexibleArgumentParser._pull_args_from_config"), "load_config_file"),
            ),
            **shared,
        ),
        Seam(
            add,
            cli_flags.adding_flags,
            checks=(
                Parameters(add, ("parser",)),
                LooksUp(add_async, "EngineArgs"),
                LooksUp(add_async, "load_general_plugins"),
            ),
            **shared,
        ),
    ]
