"""Sampling parameters for vLLM's offline ``LLM``.

Invariants:
- What they hold is what a server would make of the same grammar sent by a client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from vllm_lazy_grammar.core.request_args import LazyGrammar


def sampling_params(grammar: LazyGrammar, options: dict[str, Any]) -> SamplingParams:
    """Make vLLM's SamplingParams with this grammar and these options; extra arguments of other plugins are kept."""
    extra = {**(options.pop("extra_args", None) or {}), **grammar.extra_args()}
    structured = StructuredOutputsParams(**grammar.structured_outputs())
    return SamplingParams(structured_outputs=structured, extra_args=extra, **options)
