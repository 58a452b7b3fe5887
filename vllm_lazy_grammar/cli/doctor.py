"""What is installed and in force: the engines and the settings; vLLM and its seams the package tells itself (`vllm_lazy_grammar.seams`).

Invariants:
- Looking changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import fields
from typing import NamedTuple

from vllm_lazy_grammar.settings import Settings

ENGINES = {"xgrammar": "xgrammar", "guidance": "llguidance", "glrmask": "glrmask"}
"""Module of ours in `engines` -> the package that it needs."""


class Engine(NamedTuple):
    """A grammar engine: the package's version (empty where it is not installed), and whether this version of ours can use it."""

    package: str
    version: str
    is_served: bool


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


def settings_lines(settings: Settings) -> list[tuple[str, str, bool]]:
    """Name, value and whether it is the default, of each setting."""
    defaults = Settings()
    found = ((f.name, getattr(settings, f.name)) for f in fields(settings))
    return [(name, repr(value), value == getattr(defaults, name)) for name, value in found]
