"""JSON in structural tags, written as a family was trained."""

from __future__ import annotations

import ast
import json

import pytest
import xgrammar

from tests.tools.walking import byte_vocabulary, convert
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.engines.spelling import expand, spelled, spelled_grammar
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

JSON = {"item": ", ", "key": ": "}
SCHEMA = {
    "type": "object",
    "properties": {"größe": {"type": "string"}, "n": {"type": "number"}, "x": {}},
    "required": ["größe"],
}


def takes(grammar, text):
    info = xgrammar.TokenizerInfo([bytes([b]) for b in range(256)], stop_token_ids=[])
    matcher = xgrammar.GrammarMatcher(
        xgrammar.GrammarCompiler(info).compile_grammar(grammar), terminate_without_stop_token=False
    )
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"größe": "a", "n": 1.5}', True),
        ('{"größe": "a", "x": {"k": [1, true, null]}}', True),
        ('{"größe":"a"}', False),
        ('{"größe": "a" , "n": 1}', False),
        ('{ "größe": "a"}', False),
        ('{"größe": "a",\n"n": 1}', False),
    ],
)
def test_the_separators_are_exactly_those_given(text, taken):
    assert takes(spelled_grammar(SCHEMA, JSON, convert), text) == taken


@pytest.mark.parametrize(
    "key", ["größe", "ßa", "é1", "ÿf", "日本", "€1", "\U0001f338a", "\x80b", '"q', "\\x41", "a\tb"]
)
def test_keys_of_any_characters_survive_the_way_through_rules_as_text(key):
    schema = {"type": "object", "properties": {key: {"enum": [key, 1]}}, "required": [key]}
    text = json.dumps({key: key}, ensure_ascii=False, separators=(", ", ": "))
    grammar = spelled_grammar(schema, JSON, convert)
    assert takes(grammar, text)
    assert not takes(grammar, text.replace(": ", ": x"))


def test_a_number_can_not_grow_to_an_infinity():
    grammar = spelled_grammar({"type": "number"}, JSON, convert)
    assert takes(grammar, "1e99")
    assert not takes(grammar, "1e999")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"größe": "it\'s", "x": True}', {"größe": "it's", "x": True}),
        ("{'größe': 'a'}", None),
        (
            '{"größe": \'say "x"\', "x": {\'k\': None, "l": [False]}}',
            {"größe": 'say "x"', "x": {"k": None, "l": [False]}},
        ),
        ('{"größe": "a", "x": true}', None),
        (r'{"größe": "a\"b\\c\n"}', {"größe": 'a"b\\c\n'}),
        (r'{"größe": "a\/b"}', None),
        (r'{"größe": "\ud83d"}', None),
    ],
)
def test_python_literals_read_back_by_python_are_the_value(text, value):
    grammar = spelled_grammar(SCHEMA, {**JSON, "literals": "python"}, convert)
    assert takes(grammar, text) == (value is not None)
    if value is not None:
        assert ast.literal_eval(text) == value


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('"a</b"', True),
        ('"a</x>"', False),
        ('"</</x>"', False),
        ('"<</x"', True),
        ('"<\\/x>"', True),
        ('"</x\\n>"', True),
        ('"</x</y>"', True),
    ],
)
def test_excluded_texts_occur_in_no_free_string(text, taken):
    grammar = spelled_grammar({"type": "string"}, {**JSON, "excludes": ["</x>", "]]"]}, convert)
    assert takes(grammar, text) == taken


def test_nodes_without_a_spelling_and_tags_without_one_are_left_as_they_are():
    tag = {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": {"properties": {"spelling": True}}},
    }
    assert expand(tag, convert) == tag
    source = '{"type":"structural_tag", "format": {}}'
    assert spelled(source, convert) is source


def test_a_schema_that_spells_a_nul_keeps_free_whitespace_since_rules_as_text_end_there():
    node = {"type": "json_schema", "json_schema": {"const": "a\0b"}, "spelling": JSON}
    assert expand(node, convert) == {"type": "json_schema", "json_schema": {"const": "a\0b"}}


def test_the_engine_expands_spellings():
    node = {"type": "json_schema", "json_schema": SCHEMA, "spelling": JSON}
    source = json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<t>", "content": node, "end": "</t>"}}
    )
    grammar = XgrammarEngine(byte_vocabulary(["<s>"])).compile(GrammarKey("structural_tag", source))
    matcher = grammar.matcher()
    assert matcher.accept_bytes('<t>{"größe": "a", "n": 1}</t>'.encode())
    assert matcher.is_completed()
    assert not grammar.matcher().accept_bytes('<t>{"größe":'.encode() + b'"')
