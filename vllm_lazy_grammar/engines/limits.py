"""What no engine is given: sources so long, deep or repetitive that native code would stall on them.

Invariants:
- A source that passes is at most `SOURCE_BYTES` long, holds no NUL, and nests and repeats within the bounds below.
- The work done here is proportional to the source's length, without recursion, whatever the source is.
- A refusal is a GrammarError that names the field and the bound.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NoReturn

from vllm_lazy_grammar.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_lazy_grammar.core.matcher import GrammarKey

SOURCE_BYTES = 1 << 20
"""Length of a source as UTF-8; the largest of 404 schemas from the field has 212 kB."""

EXPRESSION_BYTES = 1 << 18
"""Length of a regular expression or of a grammar's rules: they are read token by token."""

JSON_DEPTH = 64
"""Objects and arrays within each other; the conversion's cost grows with the third power of it. The deepest of 404 schemas has 24."""

TAG_DEPTH = 80
"""The same for a structural tag, which wraps schemas."""

GROUP_DEPTH = 200
"""Groups within each other, in a regular expression or a grammar rule."""

QUANTIFIER_DEPTH = 8
"""Quantified groups within each other: each level multiplies the readings of one text."""

REPETITIONS = 100_000
"""Counted repetitions within each other, multiplied: ``(a{1,100}){1,100}`` counts 10,000."""

QUANTIFIERS = 128
"""Quantifiers in one regular expression: loops in a row are read in every combination."""

PROPERTIES = 1_000
"""Optional properties of one object: each may follow each. The largest of 404 schemas has 131."""

COUNTED_PROPERTIES = 10_000
"""Optional properties of one object times how many of them may stand, where `minProperties` or `maxProperties` counts them: each count is spelled out."""

RULES = 5_000
"""Rules of a grammar: a chain of them is a chain of states, and every copy of a matcher walks it."""

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_SCHEMA = "%json"
_RULE = re.compile(r"^[ \t]*[?!]?[\w.-]+[ \t]*(?:::=|:)", re.MULTILINE)
_QUANTIFIER = r"(?P<quantifier>[*+?]|\{(?P<low>\d*) *,? *(?P<high>\d*)\}|~ *(?P<least>\d+)(?: *\.\. *(?P<most>\d+))?)"
_GROUP = r"(?P<open>\((?:\?(?:[:=!>]|<[=!]|P?<\w+>))?)|(?P<close>\))"
_ATOM = r"(?P<atom>\\.|\[(?:\\.|[^\]\\])*\]?)"
_REGEX = re.compile(rf"{_ATOM}|{_GROUP}|{_QUANTIFIER}[?+]?", re.DOTALL)
_RULES = re.compile(rf'"(?:\\.|[^"\\])*"?|#[^\n]*|//[^\n]*|{_ATOM}|{_GROUP}|{_QUANTIFIER}', re.DOTALL)
_LONGEST_COUNT = 9


def field_of(key: GrammarKey) -> str:
    """The request's field that a key came from, as errors name it."""
    return f"structured_outputs.{key.kind}"


@dataclass(slots=True)
class _Group:
    """Extremes of what an open group holds: quantified levels, and repetitions multiplied, along the worst path."""

    quantifiers: int = 0
    repetitions: int = 1

    def join(self, quantifiers: int, repetitions: int) -> None:
        """Keep the worse of this and what stands beside it."""
        self.quantifiers = max(self.quantifiers, quantifiers)
        self.repetitions = max(self.repetitions, repetitions)


@dataclass(frozen=True, slots=True)
class Shape:
    """How deep an expression goes.

    Args:
        depth: groups within each other.
        quantifiers: quantified groups within each other.
        repetitions: counted repetitions within each other, multiplied.
        total: quantifiers, all of them.
    """

    depth: int
    quantifiers: int
    repetitions: int
    total: int


def _count(match: re.Match[str]) -> int:
    """The largest number of repetitions that a quantifier asks for; 1 where it has no upper bound, since an engine makes a loop of it."""
    numbers = [match[name] for name in ("low", "high", "least", "most") if match[name]]
    return max((int(number[:_LONGEST_COUNT]) for number in numbers), default=1)


def shape(expression: str, *, rules: bool = False) -> Shape:
    """How deep a regular expression goes; with `rules`, the rules of an EBNF or Lark grammar, each taken for itself.

    The scan ends early where groups nest too deep: what is behind does not matter any more.
    """
    stack, last, depth, total, end = [_Group()], _Group(), 0, 0, 0
    for match in (_RULES if rules else _REGEX).finditer(expression):
        if expression[end : match.start()].strip():
            last = _Group()
        end = match.end()
        if match["open"]:
            stack.append(_Group())
            depth = max(depth, len(stack) - 1)
            if depth > GROUP_DEPTH:
                break
            continue
        if match["quantifier"]:
            total += 1
            last = _Group(last.quantifiers + 1, last.repetitions * _count(match))
        else:
            last = stack.pop() if match["close"] and len(stack) > 1 else _Group()
        stack[-1].join(last.quantifiers, last.repetitions)
    return Shape(depth, max(g.quantifiers for g in stack), max(g.repetitions for g in stack), total)


def _json_depth(text: str) -> int:
    brackets = (1 if mark in "{[" else -1 for mark in re.findall(r"[{}\[\]]", _JSON_STRING.sub("", text)))
    return max(accumulate(brackets), default=0)


def _objects(node: object) -> Iterator[dict[str, object]]:
    """Every object in a JSON value; not deeper than `TAG_DEPTH`, which was checked."""
    if isinstance(node, dict):
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _objects(value)


def _expressions(schema: dict[str, object]) -> Iterator[str]:
    """The regular expressions of one object: the value of `pattern`, and the names of `patternProperties`."""
    pattern, properties = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        yield pattern
    if isinstance(properties, dict):
        yield from properties


def _optional(schema: dict[str, object]) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    return len(properties) - (len(required) if isinstance(required, list) else 0)


def _counted(schema: dict[str, object], optional: int) -> int:
    counts = [schema.get(name) for name in ("minProperties", "maxProperties")]
    if not any(isinstance(count, int) for count in counts):
        return 0
    return optional * min(optional, counts[1] if isinstance(counts[1], int) else optional)


def _refuse(key: GrammarKey, reason: str) -> NoReturn:
    raise GrammarError(field_of(key), key.source, reason)


def _check_shape(key: GrammarKey, expression: str, *, rules: bool) -> None:
    what = "a rule" if rules else "a regular expression"
    if len(expression) > EXPRESSION_BYTES:
        _refuse(key, f"{what} may have {EXPRESSION_BYTES} characters, this has {len(expression)}")
    found = shape(expression, rules=rules)
    if found.depth > GROUP_DEPTH:
        _refuse(key, f"{what} may nest {GROUP_DEPTH} groups, this one nests more")
    if found.quantifiers > QUANTIFIER_DEPTH:
        _refuse(key, f"{what} may nest {QUANTIFIER_DEPTH} quantified groups, this one nests {found.quantifiers}")
    if found.total > QUANTIFIERS and not rules:
        _refuse(key, f"{what} may have {QUANTIFIERS} quantifiers, this one has {found.total}")
    if found.repetitions > REPETITIONS:
        _refuse(key, f"nested repetitions may multiply to {REPETITIONS}, these multiply to {found.repetitions}")


def _check_rules(key: GrammarKey, text: str) -> None:
    rules = len(_RULE.findall(text))
    if rules > RULES:
        _refuse(key, f"a grammar may have {RULES} rules, this one has {rules}")
    _check_shape(key, text, rules=True)
    if _SCHEMA in text and _json_depth(text) > JSON_DEPTH:
        _refuse(key, f"a schema inside a grammar may nest {JSON_DEPTH} levels, this one nests {_json_depth(text)}")


def _check_json(key: GrammarKey) -> None:
    limit = TAG_DEPTH if key.kind == "structural_tag" else JSON_DEPTH
    depth = _json_depth(key.source)
    if depth > limit:
        _refuse(key, f"objects and arrays may nest {limit} levels, these nest {depth}")
    try:
        value = json.loads(key.source)
    except ValueError as error:
        raise GrammarError(field_of(key), key.source, f"is not JSON: {error}") from error
    for schema in _objects(value):
        _check_object(key, schema)


def _check_object(key: GrammarKey, schema: dict[str, object]) -> None:
    optional, grammar = _optional(schema), schema.get("grammar")
    if optional > PROPERTIES:
        _refuse(key, f"an object may have {PROPERTIES} optional properties, this one has {optional}")
    if _counted(schema, optional) > COUNTED_PROPERTIES:
        reason = "with `minProperties` or `maxProperties`, optional properties times their largest number may be"
        _refuse(key, f"{reason} {COUNTED_PROPERTIES}, here {_counted(schema, optional)}")
    for expression in _expressions(schema):
        _check_shape(key, expression, rules=False)
    if isinstance(grammar, str):
        _check_rules(key, grammar)


def check(key: GrammarKey) -> None:
    """Refuse what could stall an engine. GrammarError, with the bound that is exceeded."""
    size = len(key.source.encode("utf-8", "surrogatepass"))
    if size > SOURCE_BYTES:
        _refuse(key, f"may have {SOURCE_BYTES} bytes, this has {size}")
    if "\0" in key.source:
        _refuse(key, "must not hold a NUL character")
    if key.kind == "regex":
        _check_shape(key, key.source, rules=False)
    elif key.kind == "grammar":
        _check_rules(key, key.source)
    elif key.kind != "json_object":
        _check_json(key)


def nested_quantifiers(key: GrammarKey) -> Iterator[str]:
    """The patterns in a schema or structural tag that passed `check` in which quantified groups hold quantifiers; each once."""
    if key.kind in ("json", "structural_tag"):
        found = dict.fromkeys(e for schema in _objects(json.loads(key.source)) for e in _expressions(schema))
        yield from (expression for expression in found if shape(expression).quantifiers > 1)
