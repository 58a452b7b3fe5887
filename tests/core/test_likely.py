"""A grammar's source says which key is likely, and which spelling: asked by the path that was written."""

from __future__ import annotations

import json

from vllm_lazy_grammar.core.likely import likely
from vllm_lazy_grammar.core.matcher import GrammarKey

INNER = {"type": "object", "properties": {"x": {}, 'q"': {"items": {"$ref": "#/$defs/d"}}}, "required": ['q"']}
SCHEMA = {
    "properties": {"a": {}, "b": INNER, "c": {"anyOf": [{"type": "null"}, {"properties": {"y": {}}}]}},
    "required": ["c", "b"],
    "additionalProperties": {"properties": {"z": {}}},
    "$defs": {"d": {"properties": {"deep": {}}}},
}


def keys(path, kind="json", source=SCHEMA):
    return likely(GrammarKey(kind, json.dumps(source))).keys(tuple(path))


def test_required_keys_come_first_as_they_were_declared():
    assert keys([]) == (b"b", b"c", b"a")


def test_keys_are_those_of_the_object_at_the_path():
    assert keys([b"b"]) == (b'q\\"', b"x")
    assert keys([b"c"]) == (b"y",)
    assert keys([b"other"]) == (b"z",)
    assert keys([b"a"]) == ()


def test_lists_and_references_are_followed_and_one_that_leads_nowhere_is_none():
    assert keys([b"b", b'q\\"', None]) == (b"deep",)
    assert keys([], source={"$ref": "#"}) == ()
    assert keys([], source={"$ref": "#/nowhere"}) == ()


def test_a_schema_in_a_structural_tag_may_begin_inside_the_json_that_is_written():
    tag = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": SCHEMA}]},
    }
    assert keys([b"arguments", b"b"], "structural_tag", tag) == (b'q\\"', b"x")
    assert keys([b"arguments", b"a"], "structural_tag", tag) == ()


def test_where_texts_differ_the_first_is_likely_if_the_choice_is_between_them():
    def texts(*values):
        return {"type": "or", "elements": [{"type": "const_string", "value": value} for value in values]}

    tag = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [texts("<t>\n", "<t>"), texts("\n</t>", "</t>")]},
    }
    guesses = likely(GrammarKey("structural_tag", json.dumps(tag)))
    assert guesses.fork(b"so <t>", b"\n{") == b"\n"
    assert guesses.fork(b"}", b"\n<") == b"\n</t>"
    assert guesses.fork(b"}", b"\n<,") == b""
    assert guesses.fork(b"so", b"\n{") == b""


def test_other_kinds_say_nothing():
    assert likely(GrammarKey("regex", "a")).keys(()) == ()
