"""Whitespace between JSON elements is bounded, on a vocabulary small enough to check by eye."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lazy_grammar.core.blanks import ESCAPE, OUTSIDE, START, STRING, BlankBound, BlankState, advance
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.rows import is_allowed
from vllm_lazy_grammar.core.vocabulary import Vocabulary
from vllm_lazy_grammar.testing import FakeEngine

PIECES = [b" ", b"\n", b"  \n", b"{", b"}", b'"', b'"a', b'":  ', b"\\", b"~", b"a", b" b", b'" "', b'{   "', b""]
SPACE, NEWLINE, THREE, OPEN, CLOSE, QUOTE = range(6)
VOCABULARY = Vocabulary(PIECES, 20)
BOUND = BlankBound(VOCABULARY, 2)


def matcher(pattern="[\\s\\S]*"):
    return FakeEngine(VOCABULARY).compile(GrammarKey("regex", pattern)).matcher()


def walk(tokens, mode="json", pattern="[\\s\\S]*"):
    state, m = START, matcher(pattern)
    for token in tokens:
        state = BOUND.step(state, token, m, mode)
        if state is None:
            return None
        m.accept(token)
    return state


def test_a_run_of_blanks_up_to_the_bound_is_taken_and_one_more_is_refused():
    assert walk([OPEN, SPACE, NEWLINE]) == BlankState(OUTSIDE, 2)
    assert walk([OPEN, SPACE, NEWLINE, SPACE]) is None
    assert walk([OPEN, THREE]) is None


def test_any_other_byte_ends_the_run():
    assert walk([OPEN, SPACE, SPACE, OPEN, SPACE, SPACE]) == BlankState(OUTSIDE, 2)


def test_blanks_inside_a_string_are_not_counted():
    assert walk([QUOTE, SPACE, SPACE, SPACE, SPACE]) == BlankState(STRING, 0)


def test_an_escaped_quote_does_not_end_the_string():
    assert walk([QUOTE, PIECES.index(b"\\"), QUOTE, SPACE, SPACE, SPACE]) == BlankState(STRING, 0)
    assert walk([QUOTE, PIECES.index(b"\\")]).lexer == ESCAPE


def test_a_token_that_holds_too_long_a_run_in_its_middle_is_refused():
    assert walk([PIECES.index(b'{   "')]) is None
    assert walk([QUOTE, PIECES.index(b'":  ')]) == BlankState(OUTSIDE, 2)


def test_free_text_of_a_structural_tag_is_not_bounded():
    free = [SPACE] * 9
    assert walk(free, "mixed") == START
    assert walk(free, "json") is None


def test_a_quote_in_free_text_opens_no_string():
    assert walk([PIECES.index(b'"a'), SPACE], "mixed").lexer == OUTSIDE


def test_json_inside_a_structural_tag_is_bounded():
    pattern = r"\{\s*\}"
    assert walk([OPEN, SPACE, SPACE], "mixed", pattern) == BlankState(OUTSIDE, 2)
    assert walk([OPEN, SPACE, SPACE, SPACE], "mixed", pattern) is None


@pytest.mark.parametrize(
    "state", [START, BlankState(OUTSIDE, 1), BlankState(OUTSIDE, 2), BlankState(STRING, 0), BlankState(ESCAPE, 0)]
)
def test_the_row_clears_exactly_the_tokens_that_a_step_refuses(state):
    m = matcher()
    mask = BOUND.row(state)
    for token in range(VOCABULARY.size):
        allowed = mask is None or is_allowed(mask, token, VOCABULARY.size)
        assert allowed == (BOUND.step(state, token, m, "json") is not None), PIECES[token : token + 1]


@pytest.mark.parametrize("never", [frozenset(), frozenset({CLOSE})])
@pytest.mark.parametrize("state", [START, BlankState(OUTSIDE, 2), BlankState(STRING, 0)])
def test_what_is_laid_over_a_row_clears_what_the_bound_clears_and_the_ids_that_are_never_text(state, never):
    row, mask = np.full(VOCABULARY.row_words, -1, np.int32), BOUND.row(state)
    BOUND.without(never).clear(state, row)
    for token in range(VOCABULARY.size):
        in_bound = mask is None or is_allowed(mask, token, VOCABULARY.size)
        assert is_allowed(row, token, VOCABULARY.size) == (in_bound and token not in never)
    assert mask is BOUND.row(state)
    assert mask is None or is_allowed(mask, CLOSE, VOCABULARY.size)


def test_bytes_that_exceed_the_bound_leave_a_state_that_meets_it():
    assert BOUND.advance(START, b"{ \n ") == BlankState(OUTSIDE, 2)
    assert BOUND.step(BOUND.advance(START, b"    "), OPEN, matcher(), "json") == START
    assert BOUND.step(BOUND.advance(START, b"    "), SPACE, matcher(), "json") is None


def test_no_row_is_laid_over_free_text():
    m = matcher()
    row = np.zeros(VOCABULARY.row_words, np.int32)
    m.fill(row)
    assert BOUND.is_free(BlankState(OUTSIDE, 2), row, m)
    m = matcher(r"\{ *\}")
    m.fill(row)
    assert not BOUND.is_free(START, row, m)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
def test_stepping_by_tokens_equals_scanning_their_bytes(tokens):
    wide = BlankBound(VOCABULARY, 1000)
    state, m = START, matcher()
    for token in tokens:
        state = wide.step(state, token, m, "json")
    assert state == advance(START, b"".join(PIECES[t] for t in tokens))
