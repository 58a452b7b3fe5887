"""vLLM's structured output managers, stock and ours, driven without a model: a scheduler's step and nothing else.

Invariants:
- Both managers are made from one engine configuration that differs in the backend's name only.
- Both are given the same requests and the same tokens.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

if TYPE_CHECKING:
    from pathlib import Path


def manager(model: Path, backend: str, **config: Any) -> Any:
    """The manager that an engine with this backend, and more of EngineArgs' arguments, would have."""
    import vllm_lazy_grammar

    vllm_lazy_grammar.register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import core

    args = EngineArgs(
        model=str(model),
        structured_outputs_config={"backend": backend},
        load_format="dummy",
        max_num_seqs=256,
        **config,
    )
    return core.StructuredOutputManager(args.create_engine_config())


class Batch:
    """Requests with one grammar, as one manager sees them.

    Args:
        manager_: serves them.
        backend: its name.
        structured: the constraint, as keyword arguments of vLLM's StructuredOutputsParams.
        count: how many.
        xargs: ours; None for an eager request.
        names: the requests' ids begin so.
    """

    def __init__(
        self, manager_: Any, backend: str, structured: dict[str, Any], count: int, xargs: dict[str, Any] | None = None
    ) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.request import Request, RequestStatus

        self.manager = manager_
        self.requests: dict[str, Any] = {}
        for i in range(count):
            params = StructuredOutputsParams(**structured)
            params._backend = backend
            sampling = SamplingParams(max_tokens=1000, structured_outputs=params, extra_args=xargs)
            sampling.update_from_generation_config({}, manager_.tokenizer.eos_token_id)
            request = Request(f"r{i}", [1], sampling, None)
            manager_.grammar_init(request)
            self.requests[request.request_id] = request
        for request in self.requests.values():
            while not request.structured_output_request.is_grammar_ready:
                pass
            request.status = RequestStatus.RUNNING
        self.ids = list(self.requests)

    def fill(self) -> None:
        """The masks of one step."""
        self.manager.grammar_bitmask(self.requests, self.ids, {})

    def step(self, token: int) -> None:
        """One step of a scheduler: masks, then each request gets `token`."""
        self.fill()
        for request in self.requests.values():
            request.append_output_token_ids([token])
            if not self.manager.accept_tokens(request, [token]):
                raise RuntimeError(f"token {token} was refused")


def tokens_of(tokenizer: Any, value: object) -> list[int]:
    """A JSON value as a model would write it."""
    return list(tokenizer.encode(json.dumps(value, indent=1), add_special_tokens=False))
