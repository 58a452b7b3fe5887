"""How a family writes arguments that obey a tool's schema, as a structural tag.

Invariants:
- What the format takes, read as the family writes, obeys the schema.
- A schema that a family's way of writing can not be held to is an Unwritable with the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import regex

from vllm_lazy_grammar.tools.formats import (
    EMPTY,
    Format,
    either,
    free_text,
    json_value,
    optional,
    repeat,
    sequence,
    text,
)
from vllm_lazy_grammar.tools.formats import regex as matching
from vllm_lazy_grammar.tools.presets import PLACE
from vllm_lazy_grammar.tools.schemas import Keys, Schema, Unwritable, alternatives, kinds, resolve, with_definitions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_lazy_grammar.tools.presets import ArgumentRules

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_ANY_KEY = r"[A-Za-z_]([A-Za-z0-9_ -]*[A-Za-z0-9_])?"
_DEPTH = 8
_FREE_DEPTH = 3
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_GUARD = 2
"""How much of what ends a bare value is kept out of JSON strings in it: each character costs some 45 ms of compiling on 150,000 tokens."""
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "date-time": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[^\s<>\"]+",
}
_PLAIN = r'([^\s0-9"\[{\-<]|[0-9]+[^\s0-9.eE<])'
"""How a text begins that no reader takes for JSON, apart from JSON's words."""


def fill(template: str, places: Mapping[str, Format]) -> Format:
    """The template with its places filled."""
    parts = PLACE.split(template)
    return sequence(places[part] if i % 2 else text(part) for i, part in enumerate(parts))


def arguments(rules: ArgumentRules, schema: Schema, *, any_whitespace: bool) -> Format:
    """The format of the arguments of one call.

    Args:
        rules: how the family writes them.
        schema: the tool's parameters; an object.
        any_whitespace: whether JSON may be written with whitespace of any kind.

    Raises:
        Unwritable: the family can not be held to this schema.
    """
    if rules.style == "json":
        guard = {"excludes": list(rules.until)} if rules.until else {}
        return json_value(schema, None if any_whitespace else {"item": rules.item, "key": rules.colon, **guard})
    if rules.style in ("pairs", "nested"):
        writer = _Writer(rules, schema, any_whitespace)
        return either([writer.members(keys, rules.open, rules.close, 0) for keys in alternatives(schema, schema)])
    return {"type": "json_schema", "json_schema": schema, "style": rules.style}


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes arguments one by one; `root` is what references point into."""

    rules: ArgumentRules
    root: Schema
    any_whitespace: bool

    # -- objects -----------------------------------------------------------------------------------------------------

    def members(self, keys: Keys, before: str, behind: str, depth: int) -> Format:
        """An object's members between what opens and closes it."""
        names = sorted(keys.properties, key=str.lower) if self.rules.order == "sorted" else list(keys.properties)
        pairs = [(self._pair(name, keys.properties[name], depth), name in keys.required) for name in names]
        # Beside declared keys no others: one of those could be a declared one for the second time, with any value.
        inner = self._free(keys.extra, depth) if keys.extra is not None and not pairs else self._joined(pairs)
        return sequence([text(before), inner, text(behind)])

    def _pair(self, name: str, schema: Any, depth: int) -> Format:
        if not regex.fullmatch(self.rules.key_pattern, name):
            raise Unwritable(f"the key {name!r} can not be written in this format")
        return self._written(text(escaped(name) if self.rules.key == "xml" else name), schema, depth)

    def _free(self, schema: Any, depth: int) -> Format:
        """Undeclared keys, any number; of one that comes twice readers keep the last."""
        if self.rules.style == "nested" and depth > _FREE_DEPTH:
            return EMPTY
        key = _IDENTIFIER if self.rules.strings == "python" else _ANY_KEY
        pair = self._written(matching(key), schema, depth)
        return optional(sequence([pair, repeat(sequence([text(self.rules.separator), pair]), 0, None)]))

    def _joined(self, pairs: Sequence[tuple[Format, bool]]) -> Format:
        """The pairs in order, each optional one there or not, with separators only between those that are there."""
        separator = text(self.rules.separator)
        needed = next((i for i, (_, required) in enumerate(pairs) if required), None)
        if not self.rules.separator:
            return sequence(pair if required else optional(pair) for pair, required in pairs)
        if needed is None:
            starts = [self._led(pairs[i][0], pairs[i + 1 :]) for i in range(len(pairs))]
            return optional(either(starts))
        lead = [optional(sequence([pair, separator])) for pair, _ in pairs[:needed]]
        return sequence([*lead, self._led(pairs[needed][0], pairs[needed + 1 :])])

    def _led(self, first: Format, rest: Sequence[tuple[Format, bool]]) -> Format:
        parts = [first]
        for pair, required in rest:
            follower = sequence([text(self.rules.separator), pair])
            parts.append(follower if required else optional(follower))
        return sequence(parts)

    # -- values ------------------------------------------------------------------------------------------------------

    def _written(self, key: Format, schema: Any, depth: int) -> Format:
        """One member: every type that its schema takes, in the template for that type."""
        if self.rules.strings == "python":
            spelling = {"item": self.rules.item, "key": self.rules.colon, "literals": "python"}
            value = json_value(with_definitions(resolve(schema, self.root), self.root), spelling)
            return fill(self.rules.pair, {"key": key, "value": value})
        found: dict[tuple[str, str], list[Format]] = {}
        for kind in self._kinds(schema):
            name = type_name(kind)
            template = self.rules.pair if name == "string" else self.rules.other or self.rules.pair
            said = self.rules.integer if name == "integer" else name
            found.setdefault((template, said if "{type}" in template else ""), []).append(self._value(kind, depth))
        places = (
            (template, {"key": key, "value": either(values), "type": text(name)})
            for (template, name), values in found.items()
        )
        return either([fill(template, filled) for template, filled in places])

    def _kinds(self, schema: Any) -> list[Schema]:
        """The types a value may have. Where nothing says so, readers of bare values take a text; nested values show what they are."""
        found = kinds(schema, self.root)
        return [{"type": name} for name in _TYPES] if found == [{}] and self.rules.style == "nested" else found

    def _value(self, kind: Schema, depth: int) -> Format:
        if type_name(kind) == "string":
            found = self._string(kind)
            return fill(self.rules.string, {"value": found}) if self.rules.style == "nested" else found
        if self.rules.style == "nested":
            return self._nested(kind, depth)
        return self._json(kind)

    def _json(self, kind: Schema) -> Format:
        if "enum" in kind:
            return text(json.dumps(kind["enum"][0], ensure_ascii=False, separators=(self.rules.item, self.rules.colon)))
        spelling = {"item": self.rules.item, "key": self.rules.colon, "excludes": [self.rules.until[0][:_GUARD]]}
        return json_value(with_definitions(kind, self.root), None if self.any_whitespace else spelling)

    def _string(self, kind: Schema) -> Format:
        """A bare text."""
        if "enum" in kind:
            return self._constant(kind["enum"][0])
        if "pattern" in kind:
            return matching(kind["pattern"].removeprefix("^").removesuffix("$"))
        if kind.get("format") in _FORMATS:
            return matching(_FORMATS[kind["format"]])
        least, most = kind.get("minLength", 0), kind.get("maxLength")
        return self._counted(least, most) if least or most is not None else self._any_string()

    def _any_string(self) -> Format:
        end = self._end_letter()
        if self.rules.strings == "plain":
            return matching(f"({_PLAIN}[^{end}]*)?")
        if self.rules.trimmed:
            return matching(rf"([^\s{end}]([^{end}]*[^\s{end}])?)?")
        return free_text(self.rules.until)

    def _end_letter(self) -> str:
        return regex.escape(self.rules.until[0][0]) if self.rules.until else "<"

    def _counted(self, least: int, most: int | None) -> Format:
        """A text whose characters are counted, without the character that the end begins with."""
        end = self._end_letter()
        bound = "" if most is None else most
        if self.rules.strings != "plain" and not self.rules.trimmed:
            return matching(rf"[^{end}]{{{least},{bound}}}")
        first = _PLAIN if self.rules.strings == "plain" else rf"[^\s{end}]"
        if most is not None and most < 1:
            return EMPTY
        rest = "" if most is None else most - 1
        return matching(rf"{first}[^\s{end}]{{{max(least - 1, 0)},{rest}}}")

    def _constant(self, value: str) -> Format:
        if any(marker in value for marker in self.rules.until) or (self.rules.trimmed and value != value.strip()):
            raise Unwritable(f"the value {value!r} can not be written in this format")
        return text(value)

    # -- values all the way down -------------------------------------------------------------------------------------

    def _nested(self, kind: Schema, depth: int) -> Format:
        if depth > _DEPTH:
            raise Unwritable("it is nested too deep, or without end")
        if "enum" in kind:
            return self._literal(kind["enum"][0])
        name = type_name(kind)
        if name == "object":
            before, behind = self.rules.object
            return either([self.members(keys, before, behind, depth + 1) for keys in alternatives(kind, self.root)])
        if name == "array":
            return self._list(kind, depth + 1)
        return json_value({k: v for k, v in kind.items() if k != "description"}, {"item": ",", "key": ":"})

    def _literal(self, value: Any) -> Format:
        """One given value, written in this format."""
        if isinstance(value, str):
            return fill(self.rules.string, {"value": self._constant(value)})
        if isinstance(value, list):
            return self._commas([self._literal(item) for item in value], self.rules.array)
        if isinstance(value, dict):
            pairs = [fill(self.rules.pair, {"key": text(k), "value": self._literal(v)}) for k, v in value.items()]
            return self._commas(pairs, self.rules.object)
        return text(json.dumps(value))

    def _commas(self, items: Sequence[Format], around: Sequence[str]) -> Format:
        separator = text(self.rules.separator)
        inner = [part for item in items for part in (separator, item)][1:]
        return sequence([text(around[0]), *inner, text(around[1])])

    def _list(self, kind: Schema, depth: int) -> Format:
        if "prefixItems" in kind or isinstance(kind.get("items"), list):
            raise Unwritable("it has a list with a schema per place, which this format can not be held to")
        free = {} if depth <= _FREE_DEPTH else {"type": "string"}
        item = either([self._value(part, depth) for part in self._kinds(kind.get("items", free))])
        least, most = kind.get("minItems", 0), kind.get("maxItems")
        rest = repeat(
            sequence([text(self.rules.separator), item]), max(least - 1, 0), None if most is None else max(most - 1, 0)
        )
        inner = EMPTY if most == 0 else sequence([item, rest])
        return sequence([text(self.rules.array[0]), inner if least else optional(inner), text(self.rules.array[1])])


def escaped(name: str) -> str:
    """As inside an attribute's quotes."""
    return name.replace("&", "&amp;").replace('"', "&quot;")


def type_name(kind: Schema) -> str:
    """JSON Schema's name of the type that one of `kinds` takes; ``string`` where it takes anything."""
    if "enum" not in kind:
        return str(kind.get("type", "string"))
    value = kind["enum"][0]
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return next((name for python, name in names.items() if isinstance(value, python)), "null")
