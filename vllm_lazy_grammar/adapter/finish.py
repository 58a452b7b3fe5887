"""An honest finish reason: ``tool_calls`` only where there is a call, and none that a stop string cut.

Invariants:
- Where no engine of this process has our backend, a choice is what vLLM made.
- Nothing of a choice is changed but its finish reason, and that only from ``tool_calls`` to ``stop``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.adapter.frontend import serves_here

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLS = "tool_calls"


def choosing(current: Callable[..., Any]) -> Callable[..., Any]:
    """A class of vLLM's chat choices, whole or of a stream, made honest: under ``required`` vLLM takes whatever stops for a call."""

    @functools.wraps(current, updated=())
    def choice(*args: Any, **kwargs: Any) -> Any:
        made = current(*args, **kwargs)
        if made.finish_reason == _CALLS and serves_here() and not _ends_with_calls(made):
            made.finish_reason = "stop"
        return made

    return choice


def _ends_with_calls(choice: Any) -> bool:
    """Whether nothing cut the answer and, where the whole of it is known, it holds a call. A matched stop string is vLLM's textual stop reason."""
    message = getattr(choice, "message", None)
    return not isinstance(choice.stop_reason, str) and (message is None or bool(message.tool_calls))
