"""The seams that are passed once, at the start: numba's binding, the configuration, the command line, the front end's settings."""
# ruff: noqa: PLC0415 -- vLLM, and what imports it, is imported only inside functions

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar._seams import Exists, LooksUp, Offers, Parameters, Seam, Target
from vllm_lazy_grammar.plugin.names import ASYNC, INPUT

if TYPE_CHECKING:
    from collections.abc import Callable


_CONFIG = "vllm.config.structured_outputs"
_PARSER = "vllm.utils.argparse_utils"
_ARGS = "vllm.engine.arg_utils"
_MAIN = "vllm.entrypoints.cli.main"


def llvm() -> list[Seam]:
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


def config() -> list[Seam]:
    """The configuration takes `lazy`."""
    from vllm_lazy_grammar.adapter import config as replacing

    validator = "_validate_structured_output_config"
    held = f"StructuredOutputsConfig.__pydantic_decorators__.model_validators[{validator}].func"
    shared: dict[str, Any] = {
        "why": "`lazy` is a backend that the configuration takes",
        "until": "vLLM takes the names of registered backends",
        "settle": replacing.rebuild_schemas,
    }
    names = Target(_CONFIG, "StructuredOutputsBackend")
    field = Target(_CONFIG, "StructuredOutputsConfig.__dataclass_fields__[backend].type")
    return [
        Seam(names, replacing.with_lazy, checks=(Offers(names, replacing.STANDS_FOR),), **shared),
        Seam(field, replacing.with_lazy, checks=(Offers(field, replacing.STANDS_FOR),), **shared),
        Seam(
            Target(_CONFIG, held),
            replacing.validating_config,
            checks=(Parameters(Target(_CONFIG, held), ("self",)), Exists(Target("vllm.config.vllm", "VllmConfig"))),
            **shared,
        ),
    ]


def command_line() -> list[Seam]:
    """The command line takes our flag."""
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


def start(installed: Callable[[], list[str]]) -> list[Seam]:
    """What can not be served as asked is refused at the start; the checks of requests learn the settings.

    Args:
        installed: tells what is bound in this process.
    """
    from vllm_lazy_grammar.adapter import frontend, refusals

    create = Target(_ARGS, "EngineArgs.create_engine_config")
    init = Target(INPUT, "InputProcessor.__init__")
    return [
        Seam(
            create,
            functools.partial(refusals.creating_config, installed=installed),
            why="a start that could not be served as asked is refused",
            until="vLLM lets plugins validate the configuration",
            checks=(
                Exists(Target("vllm.config.vllm", "VllmConfig.__dataclass_fields__[additional_config]")),
                Exists(Target("vllm.envs", "environment_variables[VLLM_USE_RUST_FRONTEND]")),
                LooksUp(Target("vllm.entrypoints.launchers.api_server.entry", _ENTRY), "create_engine_config"),
                LooksUp(Target("vllm.v1.engine.llm_engine", "LLMEngine.from_engine_args"), "create_engine_config"),
                LooksUp(Target("vllm.v1.metrics.prometheus", "get_prometheus_registry"), "REGISTRY"),
                LooksUp(Target("vllm.v1.metrics.prometheus", "get_prometheus_registry"), "MultiProcessCollector"),
                LooksUp(Target("vllm.entrypoints.serve.instrumentator.metrics", "attach_router"), _REGISTRY),
                Exists(Target("vllm.config.parallel", "ParallelConfig.__dataclass_fields__[data_parallel_index]")),
            ),
        ),
        Seam(
            init,
            frontend.starting,
            why="the checks of requests need the settings, and are given the model's configuration only",
            until="vLLM hands its engine configuration to a backend's validation",
            checks=(
                Parameters(init, ("self", "vllm_config")),
                LooksUp(Target(ASYNC, "AsyncLLM.__init__"), "InputProcessor"),
                LooksUp(Target("vllm.v1.engine.llm_engine", "LLMEngine.__init__"), "InputProcessor"),
                LooksUp(init, "generation_config_fields"),
            ),
        ),
    ]


_ENTRY = "build_async_engine_client_from_engine_args"
_REGISTRY = "get_prometheus_registry"
