"""A control token is taken by a literal and never by free text that happens to allow its spelling."""

from __future__ import annotations

import pytest

from vllm_lazy_grammar.core.control import ControlTokens, looks_like_marker
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_END, FakeEngine, small_vocabulary

VOCABULARY = small_vocabulary()


def at(pattern, written=b""):
    matcher = FakeEngine(VOCABULARY).compile(GrammarKey("regex", pattern)).matcher()
    assert matcher.accept_bytes(written)
    return matcher


def allowed(pattern, written=b"", *, in_string=False):
    matcher = at(pattern, written)
    found = ControlTokens(VOCABULARY, (), pattern).allowed(matcher, in_string=in_string)
    assert matcher.written == written
    return found


def test_a_literal_takes_the_token_whose_text_it_spells():
    assert allowed("<call>a<end>") == [SMALL_CALL]
    assert allowed("<call>a<end>", b"<call>a") == [SMALL_END]


def test_half_a_literal_takes_no_token():
    assert allowed("<call>a<end>", b"<ca") == []


def test_free_text_takes_none():
    assert allowed('"[^"]*"<end>', b'"') == []


def test_a_literal_beside_free_text_takes_it_where_the_grammar_goes_on_differently_behind_it():
    assert allowed("(?:<call>[0-9]|[a-z<>]*)") == [SMALL_CALL]


def test_inside_a_json_string_only_a_string_that_must_be_spelled_so_takes_it():
    assert allowed('"(?:<call>|[a-z<>]*)"', b'"', in_string=True) == []
    assert allowed('"<call>"', b'"', in_string=True) == [SMALL_CALL]


def test_a_token_whose_text_stands_nowhere_in_the_grammar_is_not_tried():
    assert ControlTokens(VOCABULARY, (), "a|b").spelled == {}


def test_a_token_named_by_a_trigger_is_a_control_token_too():
    assert ControlTokens(VOCABULARY, [3], "ab").ids == {3, SMALL_CALL, SMALL_END}


@pytest.mark.parametrize(
    ("text", "is_marker"),
    [("<|im_end|>", True), ("</tool_call>", True), ("<h1>", False), ("  ", False), ("<\uff5ctool\uff5c>", True)],
)
def test_markers_are_known_by_their_form(text, is_marker):
    assert looks_like_marker(text) is is_marker
