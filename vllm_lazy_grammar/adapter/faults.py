"""Why the engine ended a request, told so that it reaches the client.

vLLM carries no text with an error, but an output's `stop_reason` is a text that travels from the engine to whoever reads the output. What is
written there is JSON, so that a reader without this package (the offline ``LLM``) sees the reason too.

Invariants:
- What `told` writes, `heard` reads; any other `stop_reason` is not ours.
- A fault is the client's where a field of the request is to blame, and then names it; whatever else is ours.
- Telling raises nothing and moves no session.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_lazy_grammar.core.rows import ALL, allowed_ids
from vllm_lazy_grammar.errors import PatternTimeoutError, ReplayRefusedError, RequestError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.v1.request import Request

    from vllm_lazy_grammar.core.matcher import Row

_KEY = "lazy_grammar_error"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request was ended.

    Args:
        message: for the client; names field and value where there is one.
        field: the request's field that is to blame; empty where the fault is ours.
        value: what stood there, as it is shown.
    """

    message: str
    field: str = ""
    value: str = ""

    def as_stop_reason(self) -> str:
        """The text that travels."""
        return json.dumps({_KEY: asdict(self)})


def heard(stop_reason: object) -> Fault | None:
    """The fault in an output's `stop_reason`; None where it is none of ours."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(f'{{"{_KEY}": '):
        return None
    return Fault(**json.loads(stop_reason)[_KEY])


def _blaming(field: str, value: object, reason: str) -> Fault:
    return Fault(str(RequestError(field, value, reason)), field, shown(value))


def fault_of(error: BaseException, request: Request) -> Fault:
    """What an error that ended a request means to its client."""
    extra: Any = getattr(request.sampling_params, "extra_args", None) or {}
    if isinstance(error, RequestError):
        return Fault(str(error), error.field, shown(error.value))
    if isinstance(error, PatternTimeoutError):
        return _blaming("vllm_xargs.grammar_triggers", extra.get("grammar_triggers"), str(error))
    if isinstance(error, ReplayRefusedError):
        return _blaming("vllm_xargs.grammar_on_reject", extra.get("grammar_on_reject"), str(error))
    return Fault(f"the request's grammar failed inside the server: {type(error).__name__}: {error}")


def fault_of_refusal(request: Request, written: Sequence[int], row: Row, ample: Row, size: int) -> Fault:
    """What a sampled token that the mask refuses means: which field of the request leaves no token, or that the fault is ours.

    Args:
        request: vLLM's.
        written: the answer before that token.
        row: the mask that it was sampled under.
        ample: the mask there if the budget was ample.
        size: ids of the vocabulary.
    """
    emptying = _emptying(request, written, row, size)
    if emptying is None:
        return Fault(
            "the model's token was refused by the request's grammar although its mask allowed it: a fault of the server, please report it"
        )
    reason = "this and the grammar leave no token that may come next"
    if _emptying(request, written, ample, size) is None:
        reason += " and leads to the end of an answer within what is left of max_tokens"
    return _blaming(*emptying, reason)


def _emptying(request: Request, written: Sequence[int], row: Row, size: int) -> tuple[str, object] | None:
    """The field, and what stands there, that takes the last token that the fields before it leave of a row; None where some are left."""
    params: Any = request.sampling_params
    legal = frozenset(allowed_ids(row, size).tolist())
    for field, value, taken in _narrowings(params, written, legal):
        legal -= taken
        if not legal:
            return field, value
    return None


def _narrowings(params: Any, written: Sequence[int], legal: frozenset[int]) -> list[tuple[str, object, frozenset[int]]]:
    """The fields of a request that take legal tokens away, in the order of suspicion, and what each takes.

    `logit_bias` takes none: it can not make a token as unlikely as a mask does.
    """
    found: list[tuple[str, object, frozenset[int]]] = [("structured_outputs", params.structured_outputs, frozenset())]
    if params.allowed_token_ids is not None:
        found.append(("allowed_token_ids", params.allowed_token_ids, legal - set(params.allowed_token_ids)))
    if params.bad_words:
        words = params.bad_words_token_ids or ()
        banned = frozenset(word[-1] for word in words if word and _ends_with(written, word[:-1]))
        found.append(("bad_words", params.bad_words, banned))
    return found


def _ends_with(written: Sequence[int], begun: Sequence[int]) -> bool:
    return list(written[max(0, len(written) - len(begun)) :]) == list(begun)


class Ended(StructuredOutputGrammar):
    """The grammar of a request that has none, because of a fault: the request is ended at its first token, with the fault.

    vLLM ends a request whose grammar is an exception without a word to its client; what its first token costs buys the reason.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def told(self, request: Request) -> str:
        """Why the request is ended, as its output's `stop_reason` tells it."""
        return fault_of(self.error, request).as_stop_reason()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:  # noqa: ARG002 -- vLLM's signature
        """Takes no token."""
        return not tokens

    def validate_tokens(self, tokens: list[int]) -> list[int]:  # noqa: ARG002 -- vLLM's signature
        """Takes no draft."""
        return []

    def rollback(self, num_tokens: int) -> None:
        """Nothing was taken."""

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Mask nothing: a row that allows no token is undefined to a sampler."""
        bitmask[batch_index].fill_(int(ALL))

    def fill_row(self, row: Row, spent: int, *, keep: bool) -> None:  # noqa: ARG002 -- as LazyGrammar has it
        """The same."""
        row.fill(ALL)

    def fill_window(self, rows: Row, drafts: Sequence[int], spent: int) -> None:  # noqa: ARG002 -- as LazyGrammar has it
        """The same."""
        rows.fill(ALL)

    def is_terminated(self) -> bool:
        """Never: it has not begun."""
        return False

    def reset(self) -> None:
        """Nothing was taken."""
