"""JSON schemas, read by their keywords: what of one an engine would drop, and what closes it against undeclared properties.

Invariants:
- Only places where a schema stands are looked at: a property may be named like a keyword, and an example may hold anything.
- A schema that is given is never changed: what is returned is a copy where it differs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm_lazy_grammar.engines.limits import field_of
from vllm_lazy_grammar.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_lazy_grammar.core.matcher import GrammarKey

Schema = dict[str, Any]

_ONE = (
    "additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "additionalItems", "unevaluatedItems", "not", "if", "then",
    "else", "items",
)  # fmt: skip
"""Keywords whose value is a schema."""
_MANY = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
"""Keywords whose value is a list of schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value has schemas by name."""
_DECLARES = ("properties", "patternProperties")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
"""Keywords that say more of the very value that their schema describes."""


def read(key: GrammarKey) -> Any:
    """The schema of a key of kind json or json_object."""
    return json.loads(key.source) if key.kind == "json" else {"type": "object"}


def _mapped(schema: Schema, change: Callable[[Any], Any]) -> Schema:
    """A copy with `change` made to each schema directly inside."""
    found = dict(schema)
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            found[keyword] = {name: change(inner) for name, inner in value.items()}
        elif keyword in _MANY and isinstance(value, list):
            found[keyword] = [change(inner) for inner in value]
        elif keyword in _ONE:
            found[keyword] = change(value)
    return found


def inside(schema: object) -> Iterator[Schema]:
    """A schema and all schemas inside it, those behind references left out; not deeper than limits allow, which were checked."""
    if not isinstance(schema, dict):
        return
    yield schema
    parts: list[Any] = []
    _mapped(schema, parts.append)
    for part in parts:
        yield from inside(part)


def closed(key: GrammarKey, schema: Schema) -> Schema:
    """The schema with undeclared properties and items refused, wherever it does not say itself what becomes of them.

    GrammarError where that can not be said: where several schemas describe one object, each would refuse what the others declare.
    """

    def close(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        found = _mapped(part, close)
        if any(name in part for name in _DECLARES):
            if any(_declares(part.get(name)) for name in _IN_PLACE):
                reason = "undeclared properties can not be refused where several schemas describe one object"
                raise GrammarError(field_of(key), key.source, reason)
            if "unevaluatedProperties" not in part:
                found.setdefault("additionalProperties", False)
        if "prefixItems" in part and "unevaluatedItems" not in part:
            found.setdefault("items", False)
        if isinstance(part.get("allOf"), list) and sum(map(_declares, part["allOf"])) > 1:
            reason = "undeclared properties can not be refused where several schemas describe one object"
            raise GrammarError(field_of(key), key.source, reason)
        return found

    closed_schema: Schema = close(schema)
    return closed_schema


def _declares(part: object) -> bool:
    """Whether what stands behind a keyword that applies in place may declare properties."""
    if isinstance(part, str):
        return True  # a reference
    if isinstance(part, list):
        return any(map(_declares, part))
    return isinstance(part, dict) and any(name in part for name in (*_DECLARES, *_IN_PLACE))
