"""What a source means before an engine reads it."""

from __future__ import annotations

import json

import pytest

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.engines import sources
from vllm_lazy_grammar.errors import GrammarError


@pytest.mark.parametrize(
    ("text", "lark"),
    [
        ("rule: 'abc'", True),
        ("rule ::= 'abc'", False),
        ("", False),
        ("// ::=\n# ::=\nstart: x", True),
        ("# a comment\nroot ::= x", False),
    ],
)
def test_lark_is_told_from_ebnf_by_the_absence_of_its_sign_outside_comments(text, lark):
    assert sources.is_lark(text) is lark


def test_the_characters_of_a_choice_are_escaped():
    rules = sources.choice_rules(GrammarKey("choice", json.dumps(['a"\\\n\r\t\0\x7f', "é"])))
    assert rules == r'root ::= "a\"\\\n\r\t\u0000\u007f" | "é"'


@pytest.mark.parametrize("source", ["[]", "{}", '"a"', "[1]", '["a", null]'])
def test_a_choice_is_a_list_of_strings_with_at_least_one(source):
    with pytest.raises(GrammarError, match=r"^structured_outputs\.choice: must be a list of strings"):
        sources.choice_rules(GrammarKey("choice", source))


def test_a_structural_tag_in_its_present_form_is_left_as_it_is():
    source = '{"type": "structural_tag", "format": {}}'
    assert sources.structural_tag(GrammarKey("structural_tag", source)) is source


def test_a_structural_tag_in_its_old_form_becomes_triggered_tags():
    old = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
    tag = json.loads(sources.structural_tag(GrammarKey("structural_tag", json.dumps(old))))["format"]
    assert tag["triggers"] == ["<f"]
    assert tag["tags"][0]["content"] == {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.mark.parametrize("source", ['{"structures": [{"begin": "a"}]}', '{"structures": []}', '{"structures": [1]}'])
def test_an_old_structural_tag_that_lacks_something_is_refused(source):
    with pytest.raises(GrammarError, match=r"^structured_outputs\.structural_tag: a structure needs"):
        sources.structural_tag(GrammarKey("structural_tag", source))


@pytest.mark.parametrize(
    ("kind", "source", "names"),
    [
        ("grammar", "root ::= Token(5)", True),
        ("grammar", "root ::= ExcludeToken (5)", True),
        ("grammar", "start: <[5]>", True),
        ("grammar", 'root ::= "<t>"', False),
        ("structural_tag", '{"type": "any_tokens"}', True),
        ("structural_tag", '{"type": "any_text"}', False),
        ("regex", "Token(5)", False),
    ],
)
def test_a_source_that_may_name_tokens_by_id_is_told_from_one_that_can_not(kind, source, names):
    assert sources.names_tokens(GrammarKey(kind, source)) is names


def test_the_ids_that_rules_ask_for_are_read_but_not_those_they_exclude():
    rules = 'root ::= (("a" Token(5, 6) ExcludeToken(7)))\nr ::= TokenTagDispatch(\n  (8, root),\n  excludes=(9)\n)'
    assert sources.named_tokens(rules) == {5, 6, 8}
