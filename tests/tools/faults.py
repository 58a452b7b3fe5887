"""Which calls the stock parser of a family can give back: the faults that presets name, as predicates.

A case is what a test asked: the tools' calls, the text, the prose before it, and the tools' schemas where the calls say too little.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One answer."""

    calls: list
    text: str
    before: str
    schemas: Mapping = field(default_factory=dict)


def has_arguments(case):
    return all(arguments for _, arguments in case.calls)


def plain_names(case):
    return not any(set(name) & set('"\\') for name, _ in case.calls)


def no_negative_number(case):
    return not re.search(r"[:\[,] ?-[0-9]", case.text)


def begins_with_call(case):
    return not case.before


def scalars(case):
    called = [case.schemas.get(name, {}) for name, _ in case.calls]
    kinds = {p.get("type") for schema in called for p in schema.get("properties", {}).values()}
    return kinds <= {"string", "integer", "number", "boolean"} and not any(
        isinstance(v, list | dict) or (isinstance(v, str) and "<" in v) for _, a in case.calls for v in a.values()
    )


def no_bracket(case):
    return not any("]" in json.dumps(arguments) for _, arguments in case.calls)


def never(_):
    return False


def all_of(*predicates):
    return lambda case: all(predicate(case) for predicate in predicates)


def like_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


REPAIRED = {"apertus"}
"""Families whose fault a later vLLM has repaired."""

LATER = "step5"
"""A parser that only this later vLLM has."""

WHOLE = {
    "cohere_command3": has_arguments,
    "cohere_command4": has_arguments,
    "phi4_mini_json": no_bracket,
    "step3": scalars,
}
"""Family -> whether the whole answer is read; default: always."""

STREAMED = {
    "hermes": plain_names,
    "longcat": plain_names,
    "apertus": no_negative_number,
    "granite-20b-fc": all_of(has_arguments, begins_with_call),
    "internlm": all_of(has_arguments, no_negative_number),
    "llama3_json": has_arguments,
    "step3": all_of(has_arguments, scalars),
    "hunyuan_a13b": never,
    "jamba": never,
    "xlam": never,
    "phi4_mini_json": never,
    "functiongemma": never,
}
"""Family -> whether the streamed answer is sure to be read; default: always."""


def whole_is_read(family, case):
    return WHOLE.get(family, lambda _: True)(case)


def streamed_is_read(family, case):
    return whole_is_read(family, case) and STREAMED.get(family, lambda _: True)(case)
