"""The one place where an error of a request becomes vLLM's: what its servers answer with status 400.

Invariants:
- The answer names the field and the value; a long value is cut.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError

from vllm_lazy_grammar.errors import RequestError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator


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
