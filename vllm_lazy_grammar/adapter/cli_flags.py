"""``--guided-decoding-backend``, which vLLM removed, as another way to write ``--structured-outputs-config.backend``.

Invariants:
- Arguments without the flag reach vLLM's parser as they were given.
- With the flag, what vLLM parses is exactly what it would parse had the operator written the present name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_lazy_grammar.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FLAG = "--guided-decoding-backend"
_FLAG = re.compile(r"--guided[-_]decoding[-_]backend(?:=(?P<value>.*))?", re.DOTALL)
_JSON = re.compile(r"--structured[-_]outputs[-_]config(?:=(?P<value>.*))?", re.DOTALL)
_DOTTED = "--structured-outputs-config.backend"


def rewritten(arguments: Sequence[str]) -> list[str]:
    """The arguments with the old flag in its present form; merged into the JSON form where that is given too.

    A flag without a value is left for vLLM's parser to complain about. SettingsError where the two forms name different backends.
    """
    rest, backend = _taken_out(arguments)
    if backend is None:
        return list(arguments)
    return _merged(rest, backend) or [*rest, f"{_DOTTED}={backend}"]


def _taken_out(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments without the flag, and its last value."""
    rest: list[str] = []
    backend: str | None = None
    remaining = iter(arguments)
    for argument in remaining:
        match = _FLAG.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        value = match["value"] if match["value"] is not None else next(remaining, None)
        if value is None:
            rest.append(argument)
        else:
            backend = value
    return rest, backend


def _merged(arguments: Sequence[str], backend: str) -> list[str] | None:
    """With `backend` inside the JSON form's object; none where there is no such form, or it is no object (vLLM complains about that)."""
    for i, argument in enumerate(arguments):
        match = _JSON.fullmatch(argument)
        if match is None:
            continue
        inline = match["value"] is not None
        text = match["value"] if inline else next(iter(arguments[i + 1 : i + 2]), "")
        merged = _with_backend(text, backend)
        if merged is None:
            return None
        written = [f"{argument.partition('=')[0]}={merged}"] if inline else [argument, merged]
        return [*arguments[:i], *written, *arguments[i + len(written) :]]
    return None


def _with_backend(text: str, backend: str) -> str | None:
    try:
        config = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(config, dict):
        return None
    if config.setdefault("backend", backend) != backend:
        raise SettingsError(FLAG, backend, f"--structured-outputs-config names another backend: {config['backend']!r}")
    return json.dumps(config)


def parsing(current: Callable[..., Any]) -> Callable[..., Any]:
    """The parser's ``parse_args`` that takes the old flag."""

    def parse_args(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        try:
            return current(self, rewritten(given), namespace)
        except SettingsError as e:
            self.error(str(e))

    return parse_args


def reading_file(current: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The parser's ``load_config_file`` that takes the old name as a key of the YAML file."""

    def load_config_file(self: Any, file_path: str) -> list[str]:
        return rewritten(current(self, file_path))

    return load_config_file


def adding_flags(current: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``EngineArgs.add_cli_args`` that shows the old flag in the help."""

    def add_cli_args(parser: Any) -> Any:
        parser = current(parser)
        group = parser.add_argument_group(title="LazyGrammar", description="Lazy grammars for structured outputs.")
        group.add_argument(FLAG, metavar="BACKEND", action=_WrittenInFull, default=argparse.SUPPRESS, help=_HELP)
        return parser

    return add_cli_args


_HELP = f"""The engine for structured outputs, `lazy` or one of vLLM's own: another way to write `{_DOTTED}`.
With `lazy`, a grammar may wait for a trigger in the model's output before it constrains anything."""


class _WrittenInFull(argparse.Action):
    """Stands for the flag in the help; reached only by an abbreviation, which would otherwise be lost silently."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(f"{FLAG} must be written in full")
