"""llguidance and glrmask beside xgrammar: the same language where both express it, an honest refusal where one does not."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.engines.guidance import GuidanceEngine
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError
from vllm_lazy_grammar.testing import SMALL_CALL, small_vocabulary

VOCABULARY = Vocabulary([bytes((byte,)) for byte in range(256)], 257)
ENGINES = {"xgrammar": XgrammarEngine(VOCABULARY), "llguidance": GuidanceEngine(VOCABULARY)}
if find_spec("glrmask"):
    from vllm_lazy_grammar.engines.glrmask import GlrmaskEngine

    ENGINES["glrmask"] = GlrmaskEngine(VOCABULARY)
OTHERS = [name for name in ENGINES if name != "xgrammar"]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {}}, "required": ["x"]}
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}})


def takes(name, key, text):
    matcher = ENGINES[name].compile(key).matcher()
    return matcher.accept_bytes(text.encode()) and matcher.is_completed()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("expression", "good", "bad"),
    [
        (r"\d\D", "1a", "\u0661a"),
        (r"\w+\W", "a_1-", "é-"),
        (r"\s\S", "\ta", "\u2003a"),
        (r"[\d/]+", "1/2", "1-2"),
        ("[[&~]+", "[&~", "a"),
        ("a/b", "a/b", "ab"),
        ("a\nb", "a\nb", "ab"),
        (r"é|\u00e8", "è", "e"),
    ],
)
def test_an_expression_means_the_same_on_every_engine(name, expression, good, bad):
    key = GrammarKey("regex", expression)
    assert takes(name, key, good)
    assert not takes(name, key, bad)


@pytest.mark.parametrize("name", ENGINES)
def test_a_choice_takes_its_texts_whatever_characters_are_in_them(name):
    texts = ["a", "ab", 'q"\\', "a.c", "\n\t", "é\u2028", "<t>/"]
    key = GrammarKey("choice", json.dumps(texts))
    assert [text for text in (*texts, "abc", "", "axc") if takes(name, key, text)] == texts


@pytest.mark.parametrize("name", ENGINES)
def test_undeclared_properties_are_refused_or_allowed_as_the_key_says(name):
    source = json.dumps(
        {**POINT, "properties": {**POINT["properties"], "z": {"type": "object", "properties": {"a": {}}}}}
    )
    for text in ('{"x": 1, "w": 2}', '{"x": 1, "z": {"b": 1}}'):
        assert not takes(name, GrammarKey("json", source), text)
        assert takes(name, GrammarKey("json", source, undeclared=True), text)
    assert takes(name, GrammarKey("json", source), '{"x": 1, "z": {"a": 1}}')


@pytest.mark.parametrize("name", ENGINES)
def test_undeclared_items_are_refused_or_allowed_as_the_key_says(name):
    source = json.dumps({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1})
    assert takes(name, GrammarKey("json", source), "[1]")
    assert not takes(name, GrammarKey("json", source), "[1, 2]")
    assert takes(name, GrammarKey("json", source, undeclared=True), "[1, 2]")


def test_undeclared_properties_are_allowed_in_the_schemas_of_a_tag_too():
    node = {"type": "json_schema", "json_schema": POINT}
    source = json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": node, "end": ">"}}
    )
    text = '<{"x": 1, "w": 2}>'
    assert not takes("xgrammar", GrammarKey("structural_tag", source), text)
    assert takes("xgrammar", GrammarKey("structural_tag", source, undeclared=True), text)


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_whitespace_is_free_or_absent_as_the_key_says(name):
    loose, tight = '{\n "x" : 1,\t"y":[1 , 2]}', '{"x":1,"y":[1,2]}'
    free, compact = GrammarKey("json", json.dumps(POINT)), GrammarKey("json", json.dumps(POINT), compact=True)
    assert [takes(name, free, text) for text in (loose, tight)] == [True, True]
    assert [takes(name, compact, text) for text in (loose, tight)] == [False, True]


@pytest.mark.skipif("glrmask" not in ENGINES, reason="glrmask is an extra")
def test_glrmask_takes_one_spelling_and_says_so_where_another_is_asked_for():
    key = GrammarKey("json", json.dumps(POINT))
    assert takes("glrmask", key, '{"x": 1, "y": [1, 2]}')
    assert not takes("glrmask", key, '{"x":1}')
    with pytest.raises(GrammarError, match="whitespace is disabled"):
        ENGINES["glrmask"].compile(GrammarKey("json", key.source, compact=True))
    with pytest.raises(GrammarError, match="`format`"):
        ENGINES["glrmask"].compile(GrammarKey("json", '{"type": "string", "format": "date"}'))


@pytest.mark.skipif("glrmask" not in ENGINES, reason="glrmask is an extra")
def test_glrmask_takes_back_more_than_it_keeps():
    matcher = ENGINES["glrmask"].compile(GrammarKey("regex", "(a|b)*c")).matcher()
    for _ in range(700):
        assert matcher.accept(ord("a"))
    assert matcher.accept_bytes(b"bb")
    assert matcher.accept(ord("c"))
    assert matcher.is_completed()
    matcher.rollback(300)
    assert (matcher.steps, matcher.is_completed()) == (402, False)
    matcher.rollback(402)
    assert matcher.steps == 0
    assert matcher.accept(ord("c"))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("grammar", 'root ::= "a"', "EBNF"),
        ("grammar", "start: <[1]>", "tokens by id"),
        ("structural_tag", TAG, "structural tags"),
        ("json", "true", "an object"),
        ("json", '{"type": "strin"}', "."),
        ("regex", "a(", "."),
        ("regex", "[^\\s\\S]", "nothing|empty|invalid|no "),
        ("choice", '["\\ud800"]', "."),
        ("choice", "[]", "at least one"),
        ("json", json.dumps({**POINT, "allOf": [{"properties": {"z": {}}}]}), "several schemas describe one object"),
    ],
)
def test_what_it_can_not_express_is_refused_with_field_and_reason(name, kind, source, reason):
    with pytest.raises(GrammarError, match=reason) as caught:
        ENGINES[name].compile(GrammarKey(kind, source))
    assert caught.value.field == f"structured_outputs.{kind}"
    assert caught.value.value == source


@pytest.mark.parametrize("name", OTHERS)
def test_lark_is_served(name):
    key = GrammarKey("grammar", 'start: "a" start "b" | "c"')
    assert takes(name, key, "aacbb")
    assert not takes(name, key, "aacb")


@pytest.mark.parametrize("name", OTHERS)
def test_no_text_takes_a_special_token_and_a_literal_spells_it_by_bytes(name):
    engine = type(ENGINES[name])(small_vocabulary())
    matcher = engine.compile(GrammarKey("grammar", 'start: "<call>" "a"')).matcher()
    assert not matcher.accept(SMALL_CALL)
    assert matcher.accept_bytes(b"<call>a")
    assert matcher.is_completed()
    with pytest.raises(GrammarError):
        engine.compile(GrammarKey("grammar", 'start: <call> "a"'))


def test_relaxed_an_engine_leaves_out_what_it_does_not_implement():
    source = '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}'
    matcher = GuidanceEngine(VOCABULARY, relaxed=True).compile(GrammarKey("json", source)).matcher()
    assert matcher.accept_bytes(b"[1, 1]")
    assert matcher.is_completed()
