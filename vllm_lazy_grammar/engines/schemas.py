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


def opened_in_tag(tag: str) -> str:
    """A structural tag, as JSON text, with undeclared properties and items allowed in its schemas, wherever they do not say themselves."""
    return json.dumps(_opened_in(json.loads(tag)), ensure_ascii=False)


def _opened_in(node: Any) -> Any:
    if isinstance(node, list):
        return [_opened_in(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and "json_schema" in node:
        return {**node, "json_schema": _opened(node["json_schema"])}
    return {key: _opened_in(value) for key, value in node.items()}


def _opened(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    found = _mapped(part, _opened)
    if any(name in part for name in _DECLARES) and "unevaluatedProperties" not in part:
        found.setdefault("additionalProperties", True)
    if "prefixItems" in part and "unevaluatedItems" not in part:
        found.setdefault("items", True)
    return found


_FORMATS = frozenset(
    [
        "email",
        "date",
        "time",
        "date-time",
        "duration",
        "ipv4",
        "ipv6",
        "hostname",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    ]
)
_ALWAYS_DROPPED = {
    "number": ("multipleOf",),
    "array": ("uniqueItems", "contains", "minContains", "maxContains"),
    "": ("not", "if", "dependentRequired", "dependentSchemas", "dependencies"),
}
"""JSON type ("" for any) -> keywords that xgrammar drops there."""
_LENGTHS = ("minLength", "maxLength")


def dropped_by_xgrammar(schema: object) -> list[str]:
    """What of a schema xgrammar reads and does not obey, by name; each once."""
    return list(dict.fromkeys(name for part in inside(schema) for name in _dropped(part)))


def _dropped(part: Schema) -> Iterator[str]:
    for kind, keywords in _ALWAYS_DROPPED.items():
        if not kind or _may_be(part, kind):
            yield from (keyword for keyword in keywords if part.get(keyword, False) is not False)
    if _may_be(part, "string"):
        yield from _dropped_of_string(part)
    if _may_be(part, "object"):
        yield from _dropped_of_object(part)
    branches = part.get("allOf")
    if isinstance(branches, list) and len(branches) > 1:
        yield "allOf"


def _may_be(part: Schema, kind: str) -> bool:
    """Whether a value of this type is described."""
    types = part.get("type", kind)
    types = types if isinstance(types, list) else [types]
    return kind in types or (kind == "number" and "integer" in types)


def _dropped_of_string(part: Schema) -> Iterator[str]:
    shape = next((name for name in ("pattern", "format") if name in part), None)
    if "format" in part and not (isinstance(part["format"], str) and part["format"] in _FORMATS):
        yield f"format {part['format']!r}"
    if shape is not None and any(name in part for name in _LENGTHS):
        yield f"{'/'.join(name for name in _LENGTHS if name in part)} beside {shape}"


def _dropped_of_object(part: Schema) -> Iterator[str]:
    patterns = part.get("patternProperties")
    if isinstance(patterns, dict) and ("properties" in part or len(patterns) > 1):
        yield "patternProperties beside others"
    names = part.get("propertyNames")
    if names is None:
        return
    beside = [name for name in _DECLARES if name in part]
    if beside or part.get("unevaluatedProperties", True) is not True:
        yield "propertyNames beside others"
    elif isinstance(names, dict) and any(_dropped_of_string(names)):
        yield "propertyNames with lengths"
