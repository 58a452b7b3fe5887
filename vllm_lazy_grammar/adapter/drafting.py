"""Whether the grammar's drafts have a place in this engine, and how many of them.

Invariants:
- Drafts are added only where the model runner takes draft ids from the scheduler, and where the proposer says of a draft nothing but its id.
"""

from __future__ import annotations

from typing import Any

from vllm_lazy_grammar.adapter.log import logger

_BY_ID = frozenset({"ngram", "suffix", "custom_class"})
"""vLLM's methods whose drafts are ids without probabilities, made on the host."""


def draft_room(vllm_config: Any, *, wanted: bool) -> int:
    """How many drafts a request may have in one step; 0 where the grammar's have no place, which is said once.

    Args:
        vllm_config: vLLM's.
        wanted: the operator's setting.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not wanted:
        return 0
    reason = _reason(vllm_config, speculative.method)
    if reason:
        logger.info("The grammar's own drafts are off: %s", reason)
        return 0
    return int(vllm_config.num_speculative_tokens)


def _reason(vllm_config: Any, method: str) -> str:
    if vllm_config.scheduler_config.async_scheduling:
        return "under async scheduling the worker keeps its own drafts"
    if vllm_config.use_v2_model_runner:
        return "the V2 model runner keeps its own drafts"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "with pipeline parallelism a step's drafts are checked after it was begun"
    if method not in _BY_ID:
        return f"the proposer {method!r} gives each draft a probability, and the grammar can not"
    return ""
