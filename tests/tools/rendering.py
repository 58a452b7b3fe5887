"""Writes calls in a family's format, from a preset's templates alone: the twin of the grammar."""

from __future__ import annotations

import json
from xml.sax.saxutils import escape

NAMESPACE = "]<]minimax[>["


def put(template, **places):
    """Templates have more than one place, and a value may look like a place: fill from the left, once."""
    out, rest = "", template
    while rest:
        found = (
            min((rest.find("{" + k + "}"), k) for k in places if "{" + k + "}" in rest)
            if any("{" + k + "}" in rest for k in places)
            else None
        )
        if found is None:
            return out + rest
        at, key = found
        out += rest[:at] + places[key]
        rest = rest[at + len(key) + 2 :]
    return out


def json_text(rules, value):
    return json.dumps(value, ensure_ascii=False, separators=(rules.item, rules.colon))


def python_text(rules, value):
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, list):
        return "[" + rules.item.join(python_text(rules, v) for v in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + rules.item.join(
                json.dumps(k, ensure_ascii=False) + rules.colon + python_text(rules, v) for k, v in value.items()
            )
            + "}"
        )
    return json.dumps(value, ensure_ascii=False)


def nested_text(rules, value):
    if isinstance(value, str):
        return put(rules.string, value=value)
    if isinstance(value, list):
        return rules.array[0] + rules.separator.join(nested_text(rules, v) for v in value) + rules.array[1]
    if isinstance(value, dict):
        return rules.object[0] + nested_members(rules, value) + rules.object[1]
    return json.dumps(value)


def nested_members(rules, value):
    keys = sorted(value, key=str.lower) if rules.order == "sorted" else value
    return rules.separator.join(put(rules.pair, key=k, value=nested_text(rules, value[k])) for k in keys)


def element_text(name, value):
    if isinstance(value, dict):
        body = "".join(element_text(k, v) for k, v in value.items())
    elif isinstance(value, list):
        body = "".join(element_text("item", v) for v in value)
    else:
        body = value if isinstance(value, str) else json.dumps(value)
    return f"{NAMESPACE}<{name}>{body}{NAMESPACE}</{name}>"


TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def type_word(rules, schema, value):
    declared = schema.get("type") if isinstance(schema, dict) else None
    name = declared if isinstance(declared, str) else TYPES[type(value)]
    return rules.integer if name == "integer" else name


def pair_text(rules, key, value, schema):
    if rules.strings == "python":
        return put(rules.pair, key=key, value=python_text(rules, value))
    bare = isinstance(value, str)
    template = rules.pair if bare else rules.other or rules.pair
    spelled = escape(key, {'"': "&quot;"}) if rules.key == "xml" else key
    return put(
        template, key=spelled, value=value if bare else json_text(rules, value), type=type_word(rules, schema, value)
    )


def arguments_text(rules, arguments, schema):
    if rules.style == "json":
        return json_text(rules, arguments)
    if rules.style == "nested":
        return nested_members(rules, arguments)
    if rules.style == "minimax_m3_xml":
        return "".join(element_text(k, v) for k, v in arguments.items())
    properties = schema.get("properties", {})
    pairs = [pair_text(rules, k, v, resolved(properties.get(k, {}), schema)) for k, v in arguments.items()]
    return rules.open + rules.separator.join(pairs) + rules.close


def resolved(schema, root):
    while isinstance(schema, dict) and "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def call_text(preset, name, arguments, schema, index=0):
    spelled = name
    if preset.call.name == "json":
        spelled = json.dumps(name, ensure_ascii=False)[1:-1]
    elif preset.call.name == "xml":
        spelled = escape(name, {'"': "&quot;"})
    if not arguments and preset.call.empty:
        return put(preset.call.empty, name=spelled, index=str(index))
    return put(
        preset.call.forms[0],
        name=spelled,
        arguments=arguments_text(preset.arguments, arguments, schema),
        index=str(index),
    )


def answer_text(preset, calls, schemas, before="", between="", behind=""):  # noqa: PLR0917 - an answer, from left to right
    """Prose and calls: one block where the family has blocks, else one block each."""
    written = [call_text(preset, n, a, schemas[n], i) for i, (n, a) in enumerate(calls)]
    opened, closed = preset.block.open[0], preset.block.close[0]
    if preset.block.separator:
        return before + opened + preset.block.separator[0].join(written) + closed + behind
    return before + between.join(opened + call + closed for call in written) + behind
