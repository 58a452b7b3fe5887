"""Reads calls back from a family's text with what Python has, not with the family's parser: nothing that was written may be lost.

JSON arguments are read by `json`, Python calls by `ast`; nested ones are written again; of the other formats calls and arguments are counted.
"""

from __future__ import annotations

import ast
import json
import re

from tests.tools.rendering import NAMESPACE, call_text, put

PLACE = re.compile(r"\{(?:key|value|type|name|index|arguments)\}")


def check(preset, schemas, text, calls):
    """The parsed calls are those of the text."""
    rules = preset.arguments
    if rules.style == "json":
        check_json(preset, text, calls)
    elif rules.strings == "python":
        assert python_calls(preset, text) == calls, text
    elif rules.style == "nested":
        assert len(calls) == text.count(preset.block.open[0]), text
        for name, arguments in calls:
            assert same_numbers(call_text(preset, name, arguments, schemas[name])) in same_numbers(text), text
    else:
        assert number_of_calls(preset, text) == len(calls), text
        assert number_of_arguments(rules, text) == sum(len(arguments) for _, arguments in calls), text


def check_json(preset, text, calls):
    written = json_calls(preset, text)
    assert [arguments for _, arguments in written] == [arguments for _, arguments in calls], text
    at = 0
    for (said, _), (name, _) in zip(written, calls, strict=True):
        assert said in (None, name), text
        spelled = json.dumps(name, ensure_ascii=False)[1:-1] if preset.call.name == "json" else name
        assert (at := text.find(spelled, at)) >= 0, text


def json_calls(preset, text):
    """(name, arguments) of each JSON object in the text; no name where it stands before the object."""
    forms = [put(form, name="@name", index="0", arguments='{"@": 0}') for form in preset.call.forms]
    shapes = [json.loads(form) for form in forms if form.startswith("{")]
    return [called(shapes, found) for found in objects(text)]


def called(shapes, found):
    if not shapes:
        return None, found
    if "@name" in shapes[0]:
        ((name, arguments),) = found.items()
        return name, arguments
    shape = next(shape for shape in shapes if shape.keys() == found.keys())
    (name,) = (found[key] for key, value in shape.items() if value == "@name")
    (arguments,) = (found[key] for key, value in shape.items() if value == {"@": 0})
    return name, arguments


def objects(text):
    """The outermost JSON objects of a text."""
    decoder, at = json.JSONDecoder(strict=False), text.find("{")
    while at >= 0:
        found, end = decoder.raw_decode(text, at)
        yield found
        at = text.find("{", end)


def python_calls(preset, text):
    opened = next(mark for mark in sorted(preset.block.open, key=len, reverse=True) if mark and mark in text)
    body = text.partition(opened)[2]
    for closed in sorted(preset.block.close, key=len, reverse=True):
        body = body.removesuffix(closed) if closed else body
    listed = ast.parse(f"[{', '.join(body.splitlines())}]", mode="eval").body.elts
    return [(ast.unparse(call.func), {k.arg: ast.literal_eval(k.value) for k in call.keywords}) for call in listed]


def same_numbers(text):
    """The text with each number as Python writes it."""
    return re.sub(r"-?[0-9]+(?:\.[0-9]+)?", lambda found: repr(float(found[0])), text)


def number_of_calls(preset, text):
    return text.count(PLACE.split(preset.call.forms[0])[0] or preset.block.open[0])


def number_of_arguments(rules, text):
    if rules.style == "minimax_m3_xml":
        return top_elements(text)
    marks = {max(PLACE.split(template), key=len) for template in (rules.pair, rules.other or rules.pair)}
    return sum(map(text.count, marks))


def top_elements(text):
    """Elements directly in an ``invoke``."""
    depth, count = 0, 0
    for closing, name in re.findall(re.escape(NAMESPACE) + r"<(/?)([^\s>]+)", text):
        if closing:
            depth -= name not in ("tool_call", "invoke")
        elif name not in ("tool_call", "invoke"):
            count += depth == 0
            depth += 1
    return count
