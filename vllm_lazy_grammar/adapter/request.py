"""A vLLM request, as a session needs it.

Invariants:
- Reads a request and changes nothing of it.
- What the front end has validated is read again here, not trusted: a request may come from a process without our front end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vllm_lazy_grammar.core.counts import EAGER, LAZY, TOOLS
from vllm_lazy_grammar.core.matcher import GrammarKey, GrammarKind
from vllm_lazy_grammar.core.triggers import KEYS, TriggerSpec
from vllm_lazy_grammar.core.xargs import PREFIX, read_bool, read_word
from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from vllm_lazy_grammar.core.vocabulary import Vocabulary

_KINDS = get_args(GrammarKind)

NO_BUDGET = 1 << 40
"""More tokens than any answer has."""

MARKERS = "grammar_markers"
"""In ``vllm_xargs``: texts of added tokens that are control tokens of this request's grammar."""

CONTEXT = "grammar_context"
"""In ``vllm_xargs``: the text of the token with which the end of the prompt begins that patterns see."""

TRACE = "grammar_trace"
"""In ``vllm_xargs``: the request's story is written down, where the operator has set a folder for it."""

COUNTED = "grammar_counted_as"
"""In ``vllm_xargs``: the kind of request that the metrics count; written by the front end where the grammar is made from tools."""

OPTIONS = (*KEYS, MARKERS, CONTEXT, TRACE, COUNTED)
"""All that is ours in ``vllm_xargs``."""


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What one request asks of the backend.

    Args:
        request_id: for log lines.
        key: the grammar.
        spec: triggers and options; None for an eager grammar.
        stop_ids: every id that ends the turn.
        markers: texts of added tokens that are control tokens besides those that are special.
        context: the end of the prompt, as far as the gate sees it.
        budget: tokens that the answer may have, reasoning included.
        min_tokens: tokens that it shall have.
        traced: it asks that its story is written down.
        prompt: the prompt's tokens; read for a trace alone.
        output: the answer's, a view that grows; read for a trace alone.
        counted_as: the kind of request that is counted, where the front end said so.
    """

    request_id: str
    key: GrammarKey
    spec: TriggerSpec | None
    stop_ids: frozenset[int]
    markers: tuple[str, ...] = ()
    context: bytes = b""
    budget: int = NO_BUDGET
    min_tokens: int = 0
    traced: bool = False
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    counted_as: str = ""

    @property
    def kind(self) -> str:
        """The kind of request that is counted."""
        return self.counted_as or (EAGER if self.spec is None else LAZY)


def read(
    request: Request, vocabulary: Vocabulary, *, compact: bool, max_model_len: int, undeclared: bool = False
) -> GrammarRequest:
    """Read a vLLM request that has a structured output.

    Args:
        request: vLLM's.
        vocabulary: the model's.
        compact: the engine's ``disable_any_whitespace``.
        max_model_len: tokens of prompt and answer together, at most.
        undeclared: properties that a schema does not declare are allowed.

    Raises:
        RequestError: a trigger or an option has a value that can not be served.
    """
    structured: Any = request.structured_output_request
    params: Any = request.sampling_params
    option, source = structured.structured_output_key
    return GrammarRequest(
        request.request_id,
        grammar_key(option.name.lower(), source, compact=compact, undeclared=undeclared),
        trigger_spec(params),
        frozenset(params.all_stop_token_ids),
        markers(params.extra_args or {}),
        _context(context_marker(params.extra_args or {}), request.prompt_token_ids or (), vocabulary),
        min(request.max_tokens, max_model_len - request.num_prompt_tokens),
        params.min_tokens,
        read_bool(params.extra_args or {}, TRACE),
        request.prompt_token_ids or (),
        request.output_token_ids,
        counted_as(params.extra_args or {}),
    )


def trigger_spec(params: SamplingParams) -> TriggerSpec | None:
    """The triggers of ``vllm_xargs`` / ``extra_args``; None where there are none."""
    extra = params.extra_args or {}
    markers(extra)
    context_marker(extra)
    counted_as(extra)
    return TriggerSpec.parse({key: value for key, value in extra.items() if key not in OPTIONS or key in KEYS})


def markers(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """The control tokens that a request names. RequestError where they are no list of texts."""
    value = extra.get(MARKERS, ())
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise RequestError(f"{PREFIX}{MARKERS}", value, "this is a list of texts of tokens")
    return tuple(value)


def counted_as(extra: Mapping[str, Any]) -> str:
    """The kind of request that is counted; empty where nothing is said. RequestError where it is none of those that the front end says."""
    return "" if extra.get(COUNTED) is None else read_word(extra, COUNTED, TOOLS)


def context_marker(extra: Mapping[str, Any]) -> str:
    """The text of the token that begins the context; empty where there is none. RequestError where it is no text."""
    value = extra.get(CONTEXT, "")
    if not isinstance(value, str):
        raise RequestError(f"{PREFIX}{CONTEXT}", value, "this is the text of a token")
    return value


def _context(marker: str, prompt: Sequence[int], vocabulary: Vocabulary) -> bytes:
    """The prompt's bytes from its last `marker` on; empty where there is none."""
    token = vocabulary.token_of(marker) if marker else None
    if token is None:
        return b""
    begin = next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] == token), len(prompt))
    return b"".join(vocabulary.piece(each) for each in prompt[begin:])


def grammar_key(kind: str, source: str, *, compact: bool, undeclared: bool = False) -> GrammarKey:
    """The key of a structured output; `compact` and `undeclared` matter to JSON alone, so that other grammars are shared."""
    if kind not in _KINDS:
        raise RequestError("structured_outputs", kind, f"must be one of {', '.join(_KINDS)}")
    return GrammarKey(
        kind,  # type: ignore[arg-type] # checked above
        source,
        compact and kind in ("json", "json_object"),
        undeclared and kind in ("json", "structural_tag"),
    )
