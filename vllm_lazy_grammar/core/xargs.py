"""Values as they arrive in `vllm_xargs`: strings, numbers and lists of them; ``true`` arrives as 1, objects as JSON text.

Invariants:
- A value that is not what a field takes is a RequestError that names the field and shows the value.
- No value is guessed at: 1.5 is no integer and 2 is no boolean.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vllm_lazy_grammar.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "vllm_xargs."

_BOOLEANS = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
_DIGITS = 9


def read_bool(xargs: Mapping[str, object], key: str) -> bool:
    """0, 1, "true" or "false", and what Python makes of them; false where the key is not there."""
    value = xargs.get(key)
    if value is None:
        return False
    known = value.lower() if isinstance(value, str) else value
    if not isinstance(known, str | int | float) or known not in _BOOLEANS:
        raise RequestError(PREFIX + key, value, "this is a boolean: 0, 1, true or false")
    return _BOOLEANS[known]


def read_int(xargs: Mapping[str, object], key: str, least: int) -> int | None:
    """A whole number of at least `least`; None where the key is not there."""
    value = xargs.get(key)
    if value is None:
        return None
    number = _whole(value)
    if number is None or number < least:
        raise RequestError(PREFIX + key, value, f"this is a whole number, {least} or more")
    return number


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None
    return value if isinstance(value, int) else None


def read_word(xargs: Mapping[str, object], key: str, words: tuple[str, ...]) -> str:
    """One of `words`; the first where the key is not there."""
    value = xargs.get(key)
    if value is None:
        return words[0]
    if not isinstance(value, str) or value not in words:
        raise RequestError(PREFIX + key, value, f"this is one of {', '.join(words)}")
    return value


def read_json(field: str, text: str) -> object:
    """JSON text as Python values."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(field, text, f"this begins like JSON and is not: {error}") from error
