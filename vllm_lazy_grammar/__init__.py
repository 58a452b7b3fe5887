"""Lazy grammars for vLLM: free text until a trigger appears, then a grammar that holds until it is complete.

Invariants:
- Importing this package imports neither vllm nor torch nor xgrammar.
- The names in ``__all__`` are the public ones.
"""

from __future__ import annotations

from vllm_lazy_grammar.core.request_args import LazyGrammar
from vllm_lazy_grammar.core.triggers import Trigger, TriggerSpec
from vllm_lazy_grammar.errors import (
    GrammarError,
    InternalError,
    LazyGrammarError,
    PatternTimeoutError,
    ReplayRefusedError,
    RequestError,
    SeamError,
    SettingsError,
)
from vllm_lazy_grammar.plugin import register, sampling_params, seams, unregister, vllm_version
from vllm_lazy_grammar.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "GrammarError",
    "InternalError",
    "LazyGrammar",
    "LazyGrammarError",
    "PatternTimeoutError",
    "ReplayRefusedError",
    "RequestError",
    "SeamError",
    "Settings",
    "SettingsError",
    "Trigger",
    "TriggerSpec",
    "__version__",
    "register",
    "sampling_params",
    "seams",
    "unregister",
    "vllm_version",
]
