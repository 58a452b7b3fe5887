"""What is installed and whether it fits together: vLLM, each seam, the engines, the settings.

Invariants:
- Looking changes nothing: no seam is bound.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from vllm_lazy_grammar.settings import Settings

if TYPE_CHECKING:
    from vllm_lazy_grammar._seams import Table

ENGINES = {"xgrammar": "xgrammar", "guidance": "llguidance", "glrmask": "glrmask"}
"""Module of ours in `engines` -> the package that it needs."""


class Engine(NamedTuple):
    """A grammar engine: the package's version (empty where it is not installed), and whether this version of ours can use it."""

    package: str
    version: str
    is_served: bool


class SeamState(NamedTuple):
    """One name of vLLM that is rebound, and what of it does not fit."""

    target: str
    why: str
    complaints: list[str]


def engines() -> list[Engine]:
    """The engines that there are."""
    return [Engine(package, _version(package), _is_there(module)) for module, package in ENGINES.items()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(f"vllm_lazy_grammar.engines.{module}") is not None


def seams() -> list[SeamState]:
    """Each seam of vLLM, in the order of the table. ImportError where vLLM can not be imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return states_of(_table())


def _table() -> Table:
    from vllm_lazy_grammar.plugin import table  # noqa: PLC0415 -- its table imports vLLM

    return table()


def states_of(table: Table) -> list[SeamState]:
    """The states of a table's seams."""
    return [SeamState(str(seam.target), seam.why, complaints) for seam, complaints in table.holding()]


def vllm_version() -> str:
    """The version of vLLM. ImportError where it can not be imported."""
    from vllm_lazy_grammar.plugin import vllm_version  # noqa: PLC0415 -- it imports vLLM

    return vllm_version()


def settings_lines(settings: Settings) -> list[tuple[str, str, bool]]:
    """Name, value and whether it is the default, of each setting."""
    defaults = Settings()
    found = ((f.name, getattr(settings, f.name)) for f in fields(settings))
    return [(name, repr(value), value == getattr(defaults, name)) for name, value in found]
