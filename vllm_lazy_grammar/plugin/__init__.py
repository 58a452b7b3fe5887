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

from vllm_lazy_grammar._seams import Table

if TYPE_CHECKING:
    from vllm import SamplingParams

    from vllm_lazy_grammar._seams import SeamState

TESTED = "vLLM 0.32.0 and 0.33.0"
WAYS_OUT = (
    "install a vLLM that it was tested with: pip install 'vllm>=0.32,<0.34'",
    "install a newer vllm-lazy-grammar",
    "run vLLM without it: uninstall vllm-lazy-grammar, or set VLLM_PLUGINS to the other plugins that you use (empty for none)",
)


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


def seams() -> list[SeamState]:
    """Each name of vLLM that is rebound, and what of it does not fit; nothing is bound for that. ImportError where there is no vLLM."""
    return table().states()


@functools.cache
def table() -> Table:
    """The one table of this process."""
    from vllm_lazy_grammar.plugin import engine, front_end, start, tool_calls

    seams = (
        *start.llvm(),
        *engine.engine(),
        *start.config(),
        *start.command_line(),
        *start.start(lambda: table().targets),
        *front_end.requests(),
        *front_end.faults(),
        *front_end.servers(),
        *tool_calls.tools(),
        *tool_calls.finish(),
    )
    return Table(seams, version=vllm_version, tested=f"tested with {TESTED}", ways_out=WAYS_OUT)


def vllm_version() -> str:
    """Name and version of the vLLM that is installed. ImportError where there is none."""
    from vllm.version import __version__

    return f"vLLM {__version__}"
