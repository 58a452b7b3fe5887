"""Limits: what no engine is given, each bound at its edge, and every real schema below them."""

from __future__ import annotations

import json
import time

import pytest

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.engines import limits
from vllm_lazy_grammar.errors import GrammarError

WITHIN, BEYOND = limits.GROUP_DEPTH, limits.GROUP_DEPTH + 1


def nested_arrays(depth):
    return '{"items": ' * (depth - 1) + "{}" + "}" * (depth - 1)


def tagged(depth):
    return '{"type": "structural_tag", "format": ' * (depth - 1) + "{}" + "}" * (depth - 1)


def groups(depth, mark=""):
    return "(" * depth + "a" + f"){mark}" * depth


def optional(count):
    return json.dumps({"properties": {f"p{i}": {} for i in range(count)}})


def counted(product):
    properties = {f"p{i}": {} for i in range(100)}
    return json.dumps(
        {"properties": properties, "maxProperties": 1_000}
        if product == 10_000
        else {"properties": properties | {"x": {}}, "minProperties": 1}
    )


def pattern(source):
    return json.dumps({"type": "string", "pattern": source})


EDGES = {
    "objects of a schema within each other": ("json", nested_arrays, limits.JSON_DEPTH),
    "objects of a structural tag within each other": ("structural_tag", tagged, limits.TAG_DEPTH),
    "groups of a regular expression": ("regex", groups, limits.GROUP_DEPTH),
    "groups of a rule": ("grammar", lambda n: f"root ::= {groups(n)}", limits.GROUP_DEPTH),
    "quantified groups": ("regex", lambda n: groups(n, "*"), limits.QUANTIFIER_DEPTH),
    "quantified groups of a rule": ("grammar", lambda n: f"root ::= {groups(n, ' *')}", limits.QUANTIFIER_DEPTH),
    "repetitions": ("regex", lambda n: f"a{{1,{n}}}", limits.REPETITIONS),
    "repetitions multiplied": ("regex", lambda n: f"(a{{{n // 100}}}){{1,100}}", limits.REPETITIONS),
    "quantifiers": ("regex", lambda n: "a?" * n, limits.QUANTIFIERS),
    "groups of a schema's pattern": ("json", lambda n: pattern(groups(n)), limits.GROUP_DEPTH),
    "objects of a schema in a Lark grammar": (
        "grammar",
        lambda n: f"start: %json {nested_arrays(n)}",
        limits.JSON_DEPTH,
    ),
    "optional properties": ("json", optional, limits.PROPERTIES),
    "optional properties that are counted": ("json", counted, limits.COUNTED_PROPERTIES),
    "rules": ("grammar", lambda n: "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)), limits.RULES),
    "length of a regular expression": ("regex", lambda n: "a" * n, limits.EXPRESSION_BYTES),
    "length of a source": ("choice", lambda n: json.dumps(["a" * (n - 4)]), limits.SOURCE_BYTES),
}


@pytest.mark.parametrize("edge", EDGES)
def test_what_is_at_a_bound_passes_and_what_is_beyond_is_refused_with_the_bound(edge):
    kind, source, bound = EDGES[edge]
    limits.check(GrammarKey(kind, source(bound)))
    with pytest.raises(GrammarError, match=str(bound)) as refused:
        limits.check(GrammarKey(kind, source(bound + bound // 10 if "multiplied" in edge else bound + 1)))
    assert refused.value.field == f"structured_outputs.{kind}"


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar", "structural_tag"])
def test_a_nul_is_refused_in_every_kind_of_source(kind):
    with pytest.raises(GrammarError, match=f"^structured_outputs.{kind}: must not hold a NUL"):
        limits.check(GrammarKey(kind, '"a\0"'))


def test_a_nul_that_is_spelled_is_text_like_any_other():
    limits.check(GrammarKey("json", '{"const": "a\\u0000b"}'))


@pytest.mark.parametrize("kind", ["json", "choice", "structural_tag"])
def test_what_is_not_json_is_refused_with_the_parsers_reason(kind):
    with pytest.raises(GrammarError, match=r"is not JSON: Expecting value: line 1 column 7"):
        limits.check(GrammarKey(kind, '{"a": '))


def test_brackets_inside_json_strings_do_not_nest():
    limits.check(GrammarKey("json", json.dumps({"const": "[" * 500 + '"\\' + "{" * 500})))


def test_patterns_and_names_of_pattern_properties_are_expressions():
    for schema in ({"pattern": groups(BEYOND)}, {"items": [{"patternProperties": {groups(BEYOND): {}}}]}):
        with pytest.raises(GrammarError, match="groups"):
            limits.check(GrammarKey("json", json.dumps(schema)))


def test_a_grammar_inside_a_structural_tag_is_held_to_the_bounds_of_rules():
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": f"root ::= {groups(BEYOND)}"}}
    with pytest.raises(GrammarError, match="a rule may nest"):
        limits.check(GrammarKey("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        ("abc", (0, 0, 1, 0)),
        ("(a+)+", (1, 2, 1, 2)),
        ("(a)(b{3})c{4,}", (1, 1, 4, 2)),
        ("(x)a+", (1, 1, 1, 1)),
        (r"\(\(a+", (0, 1, 1, 1)),
        ("[(*+]{2}", (0, 1, 2, 1)),
        ("(?:a{1,129}){1,129}", (1, 2, 16641, 2)),
        ("(?=a)b+?", (1, 1, 1, 1)),
        ("))a", (0, 0, 1, 0)),
    ],
)
def test_the_shape_of_an_expression_is_what_a_person_counts(expression, shape):
    found = limits.shape(expression)
    assert (found.depth, found.quantifiers, found.repetitions, found.total) == shape


@pytest.mark.parametrize(
    ("rules", "shape"),
    [
        ('root ::= "((((" [((] # ((((', (0, 0, 1)),
        ('root ::= ("a" | ("b") * )+ x{3}', (2, 2, 3)),
        ('start: ("a"~1..5)~3', (1, 2, 15)),
        ('root ::= ("a") x*', (1, 1, 1)),
    ],
)
def test_strings_classes_and_comments_of_rules_do_not_count(rules, shape):
    found = limits.shape(rules, rules=True)
    assert (found.depth, found.quantifiers, found.repetitions) == shape


@pytest.mark.parametrize("mark", ["(", "[", "\\", '"', "a{1,9}", "{", "#"])
def test_reading_takes_time_in_proportion_whatever_stands_there(mark):
    long = mark * (limits.EXPRESSION_BYTES // len(mark) // 8)
    start = time.process_time()
    limits.shape(long)
    limits.shape(long, rules=True)
    assert time.process_time() - start < 5
    with pytest.raises(GrammarError):
        limits.check(GrammarKey("json", long))


@pytest.mark.shared
def test_every_schema_of_maskbench_passes(shared):
    files = sorted((shared / "data" / "maskbench").glob("*.json"))
    assert len(files) == 404
    for file in files:
        limits.check(GrammarKey("json", json.dumps(json.loads(file.read_text())["schema"])))
