"""The blanks of an answer are read from what it has written, and go on so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lazy_grammar.core.blank_style import BlankStyle

VALUE = {"a": {"b": [1, 2], "c": "x, y: {"}, "d": [{"e": "\\"}, "f"], "g": 5}


def styled(text):
    style = BlankStyle()
    style.read(text.encode())
    return style


@pytest.mark.parametrize("written", [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": "\t"}])
def test_once_a_style_was_seen_all_blanks_are_foretold(written):
    text = json.dumps([VALUE, VALUE], **written)
    style, run, told = BlankStyle(), "", []
    before = style.copy()
    for at, character in enumerate(text):
        if not style.in_string and character in " \n\t":
            run += character
        elif not style.in_string:
            told.append((at, before.blanks(ord(character)).decode() == run))
            run = ""
        style.read(character.encode())
        if not run:
            before = style.copy()
    assert all(foretold for at, foretold in told if at > len(text) / 2)


def test_in_a_string_nothing_is_blank_and_a_quote_behind_a_backslash_does_not_end_it():
    style = styled('{"a": "b\\", ')
    assert style.in_string
    assert style.key is None
    assert (style.colon, style.item) == (b" ", None)


def test_a_string_behind_a_brace_or_a_comma_may_be_a_key():
    assert styled('{"ci').key == b"ci"
    assert styled('{"a": 1, "').key == b""
    assert styled('{"a": "').key is None


def test_what_is_missing_of_begun_blanks_is_told():
    style = styled('{\n    "a": 1,\n    "b": 2,')
    assert style.blanks(ord('"')) == b"\n    "
    style.read(b"\n  ")
    assert style.blanks(ord('"')) == b"  "
    style.read(b"\t")
    assert style.blanks(ord('"')) is None
    assert styled('{"a":1, ').blanks(ord('"')) == b""


def test_whoever_sets_a_blank_behind_colons_sets_one_behind_commas():
    assert styled('{"a": 1,').blanks(ord('"')) == b" "
    assert styled('{"a":1,').blanks(ord('"')) == b""
    assert styled('{"a":').blanks(ord('"')) == b""


@given(st.text('{}[]",:\\ \na1'), st.integers(0, 20))
def test_reading_in_pieces_is_reading_at_once(text, cut):
    data, pieces = text.encode(), BlankStyle()
    pieces.read(data[:cut])
    pieces = pieces.copy()
    pieces.read(data[cut:])
    assert pieces == styled(text)
