"""Importing vLLM warns about things that are not ours; our own warnings stay errors."""

from __future__ import annotations

import functools
import importlib
import warnings


@functools.cache
def import_quietly(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@functools.cache
def import_vllm():
    """Everything of vLLM that the seams touch, and the subcommands of its command line."""
    for name in ("bench.main", "collect_env", "launch", "openai", "preload", "run_batch", "serve", "snapshot"):
        import_quietly(f"vllm.entrypoints.cli.{name.replace('bench', 'benchmark')}")
    plugin = importlib.import_module("vllm_lazy_grammar.plugin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin.facts()
