"""A vLLM request, as a session needs it.

Invariants:
- Reads a request and changes nothing of it.
- What the front end has validated is read again here, not trusted: a request may come from a process without our front end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vllm_lazy_grammar.core.matcher import GrammarKey, GrammarKind
from vllm_lazy_grammar.core.triggers import TriggerSpec
from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

_KINDS = get_args(GrammarKind)


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What one request asks of the backend.

    Args:
        request_id: for log lines.
        key: the grammar.
        spec: triggers and options; None for an eager grammar.
        stop_ids: every id that ends the turn.
    """

    request_id: str
    key: GrammarKey
    spec: TriggerSpec | None
    stop_ids: frozenset[int]


def read(request: Request, *, compact: bool) -> GrammarRequest:
    """Read a vLLM request that has a structured output.

    Args:
        request: vLLM's.
        compact: the engine's ``disable_any_whitespace``.

    Raises:
        RequestError: a trigger or an option has a value that can not be served.
    """
    structured: Any = request.structured_output_request
    params: Any = request.sampling_params
    option, source = structured.structured_output_key
    return GrammarRequest(
        request.request_id,
        grammar_key(option.name.lower(), source, compact=compact),
        trigger_spec(params),
        frozenset(params.all_stop_token_ids),
    )


def trigger_spec(params: SamplingParams) -> TriggerSpec | None:
    """The triggers of ``vllm_xargs`` / ``extra_args``; None where there are none."""
    return TriggerSpec.parse(params.extra_args or {})


def grammar_key(kind: str, source: str, *, compact: bool) -> GrammarKey:
    """The key of a structured output; `compact` matters to JSON alone, so that other grammars are shared."""
    if kind not in _KINDS:
        raise RequestError("structured_outputs", kind, f"must be one of {', '.join(_KINDS)}")
    return GrammarKey(kind, source, compact and kind in ("json", "json_object"))  # type: ignore[arg-type] # checked above
