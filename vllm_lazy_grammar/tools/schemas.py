"""What formats that write arguments one by one need to know of a JSON schema: its keys, and which values are strings.

Invariants:
- Whatever obeys an answer of this module obeys the schema; what can not be answered so is an Unwritable with the reason.
- Schemas are read, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]

_DEPTH = 24
_INLINED = 6
_POOLS = ("$defs", "definitions")
_UNREADABLE = (
    "not",
    "if",
    "then",
    "else",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
)
_BY_KEYWORD = {
    "object": ("properties", "additionalProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


class Unwritable(Exception):  # noqa: N818  (a verdict on a schema, turned into a RequestError that names the tool)
    """A schema that a format can not be held to; the text says why."""


@dataclass(frozen=True, slots=True)
class Keys:
    """An object's keys.

    Args:
        properties: declared ones with their schemas, in order.
        required: those that must be there.
        extra: the schema of undeclared ones; None where there may be none.
    """

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    extra: Any = None


def resolve(schema: Any, root: Schema) -> Schema:
    """The schema behind its references, with what stands beside a reference laid over it.

    Raises:
        Unwritable: a reference points nowhere, or round in a circle.
    """
    for _ in range(_DEPTH):
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise Unwritable(f"{schema!r} takes no value")
        if "$ref" not in schema:
            return schema
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        target = _pointed(schema["$ref"], root)
        schema = {**target, **beside} if isinstance(target, Mapping) else target
    raise Unwritable("its references run in a circle")


def _pointed(reference: object, root: Schema) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise Unwritable(f"the reference {reference!r} leaves the schema")
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, Mapping) else None
        if node is None:
            raise Unwritable(f"the reference {reference!r} points nowhere")
    return node


def alternatives(schema: Any, root: Schema, depth: int = 0) -> list[Keys]:
    """The objects that a schema takes, each as its keys.

    Raises:
        Unwritable: it takes something that is no object, or has a keyword that can not be held to key by key.
    """
    if depth > _DEPTH:
        raise Unwritable("it is nested too deep, or without end")
    schema = resolve(schema, root)
    _refuse_unreadable(schema)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise Unwritable(f"its type is {kind!r}, not 'object'")
    found = [_own_keys(schema)]
    for part in schema.get("allOf", ()):
        found = [_both(a, b) for a in found for b in alternatives(part, root, depth + 1)]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            options = [b for part in schema[word] for b in alternatives(part, root, depth + 1)]
            found = [_both(a, b) for a in found for b in options]
    _refuse_counts(schema, found)
    return found


def _refuse_unreadable(schema: Schema) -> None:
    for word in (*_UNREADABLE, "enum", "const"):
        if word in schema:
            raise Unwritable(f"it has {word!r}, which a format that writes arguments one by one can not be held to")


def _refuse_counts(schema: Schema, found: Sequence[Keys]) -> None:
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    for keys in found:
        if len(keys.required) < least or (most is not None and (keys.extra is not None or len(keys.properties) > most)):
            raise Unwritable(
                "it counts its properties, which a format that writes arguments one by one can not be held to"
            )


def _own_keys(schema: Schema) -> Keys:
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties", None if "properties" in schema or _combines(schema) else True)
    required = frozenset(schema.get("required", ()))
    missing = {
        key: True if extra in (None, True, False) else extra
        for key in schema.get("required", ())
        if key not in properties
    }
    return Keys({**properties, **missing}, required, None if extra is False else extra)


def _combines(schema: Schema) -> bool:
    return any(word in schema for word in ("allOf", "anyOf", "oneOf"))


def _both(a: Keys, b: Keys) -> Keys:
    properties = dict(a.properties)
    for key, value in b.properties.items():
        known = properties.get(key, True)
        properties[key] = value if known in (True, value) else known if value is True else {"allOf": [known, value]}
    return Keys(properties, a.required | b.required, None)


def kinds(schema: Schema, root: Schema, depth: int = 0) -> list[Schema]:
    """The schema as alternatives of which each takes one type: ``type`` is a string, or ``enum`` is all there is; empty: anything.

    Raises:
        Unwritable: it is nested too deep.
    """
    if depth > _DEPTH:
        raise Unwritable("it is nested too deep, or without end")
    schema = resolve(schema, root)
    if "const" in schema:
        return [{"enum": [schema["const"]]}]
    if "enum" in schema:
        return [{"enum": [value]} for value in schema["enum"]]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            base = {key: value for key, value in schema.items() if key != word}
            return [
                kind for part in schema[word] for kind in kinds(_merged(base, resolve(part, root)), root, depth + 1)
            ]
    if len(schema.get("allOf", ())) == 1:
        base = {key: value for key, value in schema.items() if key != "allOf"}
        return kinds(_merged(base, resolve(schema["allOf"][0], root)), root, depth + 1)
    types = schema.get("type", _implied(schema))
    return [{**schema, "type": kind} for kind in ([types] if isinstance(types, str) else types)] or [{}]


def _merged(base: Schema, part: Schema) -> Schema:
    """Both at once. A keyword of both counts as the part has it where they agree, and else stays with an ``allOf``."""
    clash = [
        key for key in part if key in base and base[key] != part[key] and key not in ("description", "title", "default")
    ]
    if clash:
        raise Unwritable(f"{clash[0]!r} is said twice, differently")
    return {**base, **part}


def _implied(schema: Schema) -> list[str]:
    return next(([kind] for kind, words in _BY_KEYWORD.items() if any(word in schema for word in words)), [])


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """The schema as one of its own: what its references point at goes with it."""
    pools = {pool: root[pool] for pool in _POOLS if pool in root}
    return {**schema, **pools} if pools and "$ref" in str(schema) else schema


def inlined(schema: Any, root: Schema, depth: int = 0) -> Any:
    """The schema with its references replaced by what they point at, for parsers that look for types and follow no reference.

    References deeper than any argument nests, those of a schema within itself for instance, and broken ones are left as they are.
    """
    if isinstance(schema, list):
        return [inlined(part, root, depth) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema and depth < _INLINED:
        try:
            return inlined(resolve(schema, root), root, depth + 1)
        except Unwritable:
            return schema
    return {key: inlined(value, root, depth) for key, value in schema.items() if key not in _POOLS or depth}
