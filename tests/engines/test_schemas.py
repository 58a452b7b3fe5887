"""Schemas read by their keywords: what an engine would drop, and what is closed."""

from __future__ import annotations

import pytest

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.engines import schemas
from vllm_lazy_grammar.errors import GrammarError

KEY = GrammarKey("json", "{}")


@pytest.mark.parametrize(
    ("schema", "dropped"),
    [
        ({"type": "integer", "multipleOf": 2}, ["multipleOf"]),
        ({"type": "string", "multipleOf": 2}, []),
        ({"type": ["array", "null"], "uniqueItems": True, "contains": {}}, ["uniqueItems", "contains"]),
        ({"type": "array", "uniqueItems": False}, []),
        ({"type": "string", "format": "date"}, []),
        ({"type": "string", "format": "iban"}, ["format 'iban'"]),
        ({"type": "string", "format": {}}, ["format {}"]),
        ({"type": "string", "format": ["date"]}, ["format ['date']"]),
        ({"type": "string", "pattern": "a", "maxLength": 3}, ["maxLength beside pattern"]),
        ({"type": "string", "maxLength": 3}, []),
        ({"type": "object", "properties": {}, "patternProperties": {"a": {}}}, ["patternProperties beside others"]),
        ({"type": "object", "patternProperties": {"a": {}}}, []),
        ({"propertyNames": {"pattern": "a"}, "properties": {}}, ["propertyNames beside others"]),
        (
            {"propertyNames": {"pattern": "a", "minLength": 1}},
            ["propertyNames with lengths", "minLength beside pattern"],
        ),
        ({"allOf": [{}, {}]}, ["allOf"]),
        ({"allOf": [{}]}, []),
        ({"not": {"type": "string"}}, ["not"]),
        ({"if": {}, "then": {}}, ["if"]),
        ({"properties": {"not": {}, "if": {}, "a": {"items": {"anyOf": [{"multipleOf": 3}]}}}}, ["multipleOf"]),
        ({"$defs": {"a": {"uniqueItems": True}}, "$ref": "#/$defs/a"}, ["uniqueItems"]),
        ({"enum": [{"not": 1}], "const": {"multipleOf": 3}, "examples": [{"if": 1}]}, []),
        (True, []),
    ],
)
def test_what_xgrammar_drops_is_found_where_a_schema_stands_and_nowhere_else(schema, dropped):
    assert schemas.dropped_by_xgrammar(schema) == dropped


def test_a_closed_schema_says_everywhere_what_becomes_of_undeclared_properties_and_the_given_one_is_as_it_was():
    given = {
        "properties": {
            "a": {"properties": {"b": {}}, "additionalProperties": {"type": "string"}},
            "c": {"type": "object"},
        },
        "$defs": {"d": {"prefixItems": [{"properties": {}}]}},
    }
    before = repr(given)
    assert schemas.closed(KEY, given) == {
        "properties": {
            "a": {"properties": {"b": {}}, "additionalProperties": {"type": "string"}},
            "c": {"type": "object"},
        },
        "$defs": {"d": {"prefixItems": [{"properties": {}, "additionalProperties": False}], "items": False}},
        "additionalProperties": False,
    }
    assert repr(given) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {}, "$ref": "#/$defs/a"},
        {"properties": {}, "anyOf": [{"required": ["a"]}, {"properties": {}}]},
        {"allOf": [{"properties": {}}, {"$ref": "#/$defs/a"}]},
    ],
)
def test_where_several_schemas_describe_one_object_it_can_not_be_closed(schema):
    with pytest.raises(GrammarError, match="several schemas describe one object"):
        schemas.closed(KEY, schema)


def test_alternatives_that_declare_nothing_do_not_stand_against_closing():
    schema = {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}
    assert schemas.closed(KEY, schema) == {**schema, "additionalProperties": False}
