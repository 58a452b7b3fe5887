"""A proposer that proposes nothing, so that the grammar's drafts have a place where no other proposer is wanted.

Named in ``--speculative-config``: ``{"method": "custom_class", "model": "vllm_lazy_grammar.adapter.proposer.GrammarProposer",
"num_speculative_tokens": 8}``. vLLM asks it in the worker; the drafts are added in the engine, where the grammars are.
"""

from __future__ import annotations

from typing import Any


class GrammarProposer:
    """vLLM's interface of a custom proposer.

    Args:
        vllm_config: not needed.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Nothing is kept."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model to load."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """No draft for any request."""
        return [[] for _ in sampled_token_ids]
