"""``lazy`` as a value of vLLM's structured outputs configuration.

Invariants:
- What the configuration takes and refuses for any other backend is unchanged, message included.
- An object of the configuration stays of vLLM's own class, so it travels between processes as before.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND = "lazy"
"""The name of our backend, as an operator writes it."""

STANDS_FOR = "xgrammar"
"""The backend of vLLM whose restrictions hold for ours."""


def with_lazy(backends: Any) -> Any:
    """The ``Literal`` of backend names with ours at its end; names that a third party added stay."""
    return Literal[(*get_args(backends), BACKEND)]


def validating_config(current: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The configuration's validator: a lazy one is judged as if it said xgrammar (so ``disable_any_whitespace`` is taken)."""

    def validate(self: Any) -> Any:
        if self.backend != BACKEND:
            return current(self)
        current(standing_for(self))
        return self

    return validate


def standing_for(config: Any) -> Any:
    """A copy of a lazy configuration that says xgrammar: what vLLM's own checks are given."""
    seen = copy.copy(config)
    seen.backend = STANDS_FOR
    return seen


def is_lazy(vllm_config: Any) -> bool:
    """Whether this engine configuration chose our backend."""
    config = getattr(vllm_config, "structured_outputs_config", None)
    return config is not None and config.backend == BACKEND


def rebuild_schemas() -> None:
    """Let pydantic read the changed field and validator: the configuration's own schema, and the one nested in the engine's."""
    import vllm.config.vllm as outer  # noqa: PLC0415  (vLLM is imported only where it is touched)
    from pydantic.dataclasses import rebuild_dataclass  # noqa: PLC0415
    from vllm.config.structured_outputs import StructuredOutputsConfig  # noqa: PLC0415

    rebuild_dataclass(StructuredOutputsConfig, force=True)
    rebuild_dataclass(outer.VllmConfig, force=True, _types_namespace=vars(outer))
