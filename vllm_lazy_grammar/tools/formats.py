"""Building blocks of structural tags, as plain JSON values.

The dialect is xgrammar's structural tag format with one addition: a ``json_schema`` node may carry ``spelling``, an object of ``item`` and
``key`` (the separators, exactly as written, no other whitespace), ``literals`` (``json``, or ``python`` for ``True``, ``False``, ``None``
and strings in either quotes) and ``excludes`` (texts that occur in no free string). The engine expands it.

Invariants:
- No empty constant is ever emitted, and neighbouring constants are one.
- What is returned is made of dicts, lists, strings, numbers and booleans only, so that ``json.dumps`` writes it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Format = dict[str, Any]
"""One node of a structural tag."""

EMPTY: Format = {"type": "sequence", "elements": []}
"""Matches the empty text; vanishes in `sequence`."""


def text(value: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": value} if value else EMPTY


def sequence(parts: Iterable[Format]) -> Format:
    """One after the other; constants that meet become one."""
    flat: list[Format] = []
    for part in parts:
        for element in part["elements"] if part["type"] == "sequence" else [part]:
            if flat and element["type"] == flat[-1]["type"] == "const_string":
                flat[-1] = text(flat[-1]["value"] + element["value"])
            else:
                flat.append(element)
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def either(options: Sequence[Format]) -> Format:
    """Any one of them; an empty one makes the rest optional."""
    kept: list[Format] = []
    for option in options:
        if option != EMPTY and option not in kept:
            kept.append(option)
    found = EMPTY if not kept else kept[0] if len(kept) == 1 else {"type": "or", "elements": kept}
    return optional(found) if kept and EMPTY in options else found


def texts(values: Sequence[str]) -> Format:
    """Any one of these texts."""
    return either([text(value) for value in values])


def optional(content: Format) -> Format:
    """It, or nothing."""
    return EMPTY if content == EMPTY else {"type": "optional", "content": content}


def repeat(content: Format, least: int, most: int | None) -> Format:
    """It, between `least` and `most` times; none: without a bound."""
    if most == 0:
        return EMPTY
    return {"type": "repeat", "min": least, "max": -1 if most is None else most, "content": content}


def regex(pattern: str) -> Format:
    """A text that the whole pattern matches."""
    return {"type": "regex", "pattern": pattern}


def free_text(excludes: Sequence[str]) -> Format:
    """Any text in which none of `excludes` occurs."""
    return {"type": "any_text", "excludes": list(excludes)}


def json_value(schema: object, spelling: Mapping[str, Any] | None) -> Format:
    """A JSON value that the schema takes; with `spelling` written exactly so, else with free whitespace."""
    node: Format = {"type": "json_schema", "json_schema": schema}
    return node if spelling is None else {**node, "spelling": dict(spelling)}


def structural_tag(content: Format) -> str:
    """The source of a ``structural_tag`` grammar."""
    return json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False, separators=(",", ":"))
