"""The one place where an error of a request becomes vLLM's: what its servers answer with status 400.

Invariants:
- The answer names the field and the value; a long value is cut.
- An output that the engine ended with a reason never reaches a serving class: its reader gets the reason as an error. Status 500 is for
  faults of ours alone.
"""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GenerationError, VLLMValidationError

from vllm_lazy_grammar.adapter.config import is_lazy
from vllm_lazy_grammar.adapter.faults import heard
from vllm_lazy_grammar.errors import RequestError, shown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator


class RefusedRequestError(VLLMValidationError):
    """A request that is refused, as vLLM's servers understand it: status 400, ``param`` is the field."""

    def __str__(self) -> str:
        return str(self.args[0])  # field and value stand in it; vLLM would add them again


@contextmanager
def as_client_errors() -> Iterator[None]:
    """Within, a RequestError becomes a RefusedRequestError."""
    try:
        yield
    except RequestError as e:
        raise RefusedRequestError(str(e), parameter=e.field, value=shown(e.value)) from e


def raise_if_ended(output: Any) -> None:
    """Raise the reason that an output carries, where the engine ended it with one.

    A client's fault is no GenerationError: what vLLM's streams make of one has neither type nor field.
    """
    for each in output.outputs:
        fault = heard(each.stop_reason) if each.finish_reason == "error" else None
        if fault is not None and fault.field:
            raise RefusedRequestError(fault.message, parameter=fault.field, value=fault.value)
        if fault is not None:
            raise GenerationError(fault.message)


def generating(current: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """``AsyncLLM.generate`` that raises the reason where the engine ended the request with one; vLLM's own says nothing of it."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        outputs = current(self, *args, **kwargs)
        return _told(outputs) if is_lazy(self.vllm_config) else outputs

    return generate


async def _told(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            raise_if_ended(output)
            yield output
