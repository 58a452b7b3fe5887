"""Errors, named by who must act: the requester, the operator, or us.

Invariants:
- Every error that reaches a user names the field and the value it is about.
- Foreign errors (xgrammar, regex, pydantic) are translated into these where they are raised, and nowhere else.
"""

from __future__ import annotations

_SHOWN = 200


def shown(value: object) -> str:
    """The value as an error message shows it: its repr, cut in the middle where it is long."""
    text = repr(value)
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


class LazyGrammarError(Exception):
    """Root of all errors of this package."""


class RequestError(LazyGrammarError, ValueError):
    """The requester must act: a field of the request has a value that can not be served.

    Args:
        field: the field as the client wrote it, e.g. ``vllm_xargs.grammar_triggers[0]``.
        value: what stood there.
        reason: one sentence that says what is wrong and, where it helps, what would be right.
    """

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}: {reason} (got {shown(value)})")
        self.field = field
        self.value = value
        self.reason = reason


class GrammarError(RequestError):
    """The grammar or schema of a request can not be compiled."""


class PatternTimeoutError(LazyGrammarError):
    """A trigger pattern ran too long while it was matched; ends its request only.

    Args:
        pattern: the trigger's pattern as written.
        reason: what was exceeded.
    """

    def __init__(self, pattern: str, reason: str) -> None:
        super().__init__(f"trigger pattern {shown(pattern)}: {reason}")
        self.pattern = pattern
        self.reason = reason


class ReplayRefusedError(LazyGrammarError):
    """Under ``grammar_on_reject: error``: a trigger fired and the grammar refuses what follows; ends its request only.

    Args:
        data: the bytes that the grammar refused, from the start of the match.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(f"grammar_on_reject=error: the grammar refuses {shown(data)} behind the trigger")
        self.data = data


class SettingsError(LazyGrammarError, ValueError):
    """The operator must act: a setting has a value that can not be used.

    Args:
        field: the setting's name, e.g. ``additional_config.lazy_grammar.prewarm_top_k``.
        value: what stood there.
        reason: one sentence.
    """

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}: {reason} (got {shown(value)})")
        self.field = field
        self.value = value
        self.reason = reason


class SeamError(LazyGrammarError, RuntimeError):
    """The operator must act: vLLM is not the one that the seams were made for."""


class InternalError(LazyGrammarError, RuntimeError):
    """We must act: an invariant of ours is broken."""
