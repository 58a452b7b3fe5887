"""What every matcher must do, whatever engine stands behind it: the sentences of core/matcher.py, run against the fake and each real engine that is installed."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lazy_grammar.core.matcher import GrammarKey, fill_ahead, taken
from vllm_lazy_grammar.engines.guidance import GuidanceEngine
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError
from vllm_lazy_grammar.testing import (
    SMALL_CALL,
    SMALL_EMPTY,
    SMALL_END,
    SMALL_HALF_FIRST,
    SMALL_HALF_SECOND,
    SMALL_SIZE,
    SMALL_TWIN,
    FakeEngine,
    allowed_ids,
    small_vocabulary,
)

VOCABULARY = small_vocabulary()
ENGINES = {
    "fake": FakeEngine(VOCABULARY),
    "xgrammar": XgrammarEngine(VOCABULARY),
    "llguidance": GuidanceEngine(VOCABULARY),
}
if find_spec("glrmask"):
    from vllm_lazy_grammar.engines.glrmask import GlrmaskEngine

    ENGINES["glrmask"] = GlrmaskEngine(VOCABULARY)
LOOKS_AHEAD = frozenset({"fake", "xgrammar"})
"""Which of them have methods of their own for several tokens."""
EXPRESSIONS = [
    "ab*c|é",
    "<t>(12|1a)",
    "(ab|a)*c",
    "a{2,3}b?",
    r"\{(\"[ab]+\":[12]+(,\"[ab]+\":[12]+)*)?\}",
    "(a|bc|é)+",
    "<call>a|<end>",
    "a",
]
NEVER = [SMALL_CALL, SMALL_END, SMALL_EMPTY, *range(27, SMALL_SIZE)]
OUTSIDE = [-1, SMALL_SIZE, 1 << 20]
COMPILED = {
    (name, source): engine.compile(GrammarKey("regex", source))
    for name, engine in ENGINES.items()
    for source in EXPRESSIONS
}


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


@pytest.fixture
def start(engine):
    return lambda source: engine.compile(GrammarKey("regex", source)).matcher()


def mask(matcher, before=0x55555555):
    row = np.full(2, before, dtype=np.int32)
    assert matcher.fill(row) is True
    return allowed_ids(row)


def seen(matcher):
    """Everything a matcher tells about its position."""
    return matcher.steps, mask(matcher), matcher.is_completed(), matcher.certain()


def tried(matcher):
    """The mask, by offering every id to a copy."""
    return [token for token in range(SMALL_SIZE) if matcher.fork().accept(token)]


walks = st.lists(st.one_of(st.integers(0, SMALL_SIZE - 1), st.integers(-4, -1)), max_size=14)


@settings(max_examples=60)
@given(choices=walks, source=st.sampled_from(EXPRESSIONS), name=st.sampled_from(sorted(ENGINES)))
def test_a_walk_with_rollbacks_equals_a_fresh_replay_of_what_was_kept(choices, source, name):
    matcher = COMPILED[name, source].matcher()
    kept = []
    for choice in choices:
        if choice < 0:
            back = min(-choice, len(kept))
            matcher.rollback(back)
            del kept[len(kept) - back :]
        elif matcher.accept(choice):
            kept.append(choice)
    fresh = COMPILED[name, source].matcher()
    assert all(fresh.accept(token) for token in kept)
    assert seen(matcher) == seen(fresh)


@settings(max_examples=60)
@given(choices=st.lists(st.integers(0, 40), max_size=8), source=st.sampled_from(EXPRESSIONS))
def test_every_mask_is_what_offering_each_token_says_and_all_engines_say_the_same(choices, source):
    matchers = [COMPILED[name, source].matcher() for name in ENGINES]
    for choice in choices:
        masks = [mask(matcher) for matcher in matchers]
        assert all(other == masks[0] for other in masks)
        assert all(tried(matcher) == masks[0] for matcher in matchers)
        assert len({matcher.is_completed() for matcher in matchers}) == 1
        if not masks[0]:
            break
        token = masks[0][choice % len(masks[0])]
        assert all(matcher.accept(token) for matcher in matchers)


@settings(max_examples=40)
@given(choices=st.lists(st.integers(0, 40), max_size=6), source=st.sampled_from(EXPRESSIONS))
def test_what_is_certain_is_the_only_byte_at_each_place_and_nowhere_may_the_text_end_before(choices, source):
    for name in ENGINES:
        matcher = COMPILED[name, source].matcher()
        for choice in choices:
            allowed = mask(matcher)
            if allowed:
                matcher.accept(allowed[choice % len(allowed)])
        for byte in matcher.certain():
            assert not matcher.is_completed()
            assert [b for b in range(256) if matcher.fork().accept_bytes(bytes((b,)))] == [byte]
            assert matcher.accept_bytes(bytes((byte,)))


@settings(max_examples=80)
@given(
    choices=st.lists(st.integers(0, 40), max_size=4),
    more=st.lists(st.integers(0, 200), max_size=6),
    source=st.sampled_from(EXPRESSIONS),
    name=st.sampled_from(sorted(ENGINES)),
)
def test_looking_ahead_says_what_accept_and_fill_by_turns_say_and_moves_nothing(choices, more, source, name):
    matcher = COMPILED[name, source].matcher()
    for choice in choices:
        if allowed := mask(matcher):
            matcher.accept(allowed[choice % len(allowed)])
    tokens, walker = [], matcher.fork()
    for number in more:  # most follow the grammar
        allowed = mask(walker)
        tokens.append(allowed[number % len(allowed)] if allowed and number % 8 else number % 48 - 4)
        walker.accept(tokens[-1])
    before, rows = seen(matcher), np.full((2, len(tokens) + 1, 2), 0x55555555, np.int32)
    expected = fill_ahead(matcher, tokens, rows[0])
    assert taken(matcher, tokens) == len(expected) - 1
    own = name in LOOKS_AHEAD
    assert own == (hasattr(matcher, "taken") and hasattr(matcher, "fill_ahead"))
    if own:
        assert matcher.taken(tokens) == len(expected) - 1
        assert matcher.fill_ahead(tokens, rows[1]) == expected
        np.testing.assert_array_equal(rows[1, : len(expected)], rows[0, : len(expected)])
    assert seen(matcher) == before


def test_a_refused_token_changes_nothing(start):
    matcher = start("ab*c|é")
    assert matcher.accept(0)
    before = seen(matcher)
    assert not matcher.accept(6)
    assert seen(matcher) == before


def test_refused_bytes_change_nothing_even_where_the_first_of_them_are_legal(start):
    matcher = start("ab*c")
    before = seen(matcher)
    assert not matcher.accept_bytes(b"abbx")
    assert seen(matcher) == before


def test_one_call_is_one_step_however_many_bytes_it_took(start):
    matcher = start("ab*c")
    assert matcher.accept_bytes(b"abbb")
    assert matcher.accept(2)
    assert matcher.steps == 2
    matcher.rollback(1)
    assert mask(matcher) == [1, 2, 5]
    matcher.rollback(1)
    assert seen(matcher) == seen(start("ab*c"))


def test_empty_bytes_are_accepted_and_are_no_step(start):
    matcher = start("ab")
    assert matcher.accept_bytes(b"")
    assert matcher.steps == 0
    assert matcher.accept_bytes(b"ab")
    assert matcher.accept_bytes(b"")
    matcher.rollback(1)
    assert matcher.steps == 0


@pytest.mark.parametrize("steps", [2, 100, -1])
def test_more_steps_than_there_are_can_not_be_taken_back_and_nothing_changes(start, steps):
    matcher = start("ab")
    matcher.accept(0)
    before = seen(matcher)
    with pytest.raises(ValueError, match=r"steps of 1"):
        matcher.rollback(steps)
    assert seen(matcher) == before


def test_no_steps_can_always_be_taken_back(start):
    matcher = start("ab")
    matcher.rollback(0)
    assert matcher.steps == 0


def test_a_fork_and_its_origin_go_their_own_ways(start):
    matcher = start("(ab|a)*c")
    matcher.accept(0)
    fork = matcher.fork()
    assert seen(fork) == seen(matcher)
    assert fork.accept(1)
    assert fork.accept(2)
    assert matcher.accept(0)
    assert (mask(matcher), mask(fork)) == ([0, 1, 2, 3, 4, 5, SMALL_TWIN], [])
    fork.rollback(2)
    assert fork.is_completed() is False


def test_special_tokens_ids_without_bytes_and_padding_are_never_allowed(start):
    matcher = start("[^x]*")
    allowed = mask(matcher)
    assert not set(allowed) & set(NEVER)
    assert not any(matcher.accept(token) for token in NEVER)
    assert matcher.steps == 0


def test_ids_outside_the_vocabulary_are_refused(start):
    matcher = start("[^x]*")
    assert not any(matcher.accept(token) for token in OUTSIDE)
    assert matcher.steps == 0


def test_a_special_token_is_spelled_by_bytes_where_the_grammar_takes_its_text(start):
    matcher = start("<call>a")
    assert matcher.accept_bytes(b"<call>")
    assert mask(matcher) == [0, SMALL_TWIN]


@pytest.mark.parametrize("before", [0, -1, 0x55555555])
def test_every_bit_of_the_row_is_written(start, before):
    assert mask(start("ab*c|é"), before) == [0, 3, 4, 20, SMALL_HALF_FIRST, SMALL_TWIN]


def test_a_row_may_be_a_line_of_a_larger_array_and_its_neighbours_are_left_alone(start):
    rows = np.full((3, 2), 7, dtype=np.int32)
    start("a").fill(rows[1])
    assert allowed_ids(rows[1]) == [0, SMALL_TWIN]
    assert (rows[0] == 7).all()
    assert (rows[2] == 7).all()


def test_a_complete_text_terminates_nothing_and_more_may_be_legal(start):
    matcher = start("ab?")
    assert matcher.accept(0)
    assert matcher.is_completed()
    assert mask(matcher) == [1]
    assert not matcher.accept(SMALL_END)
    assert matcher.accept(1)
    assert matcher.is_completed()
    assert mask(matcher) == []
    assert not matcher.accept(1)
    matcher.rollback(2)
    assert mask(matcher) == [0, 3, SMALL_TWIN]


def test_both_ids_of_the_same_bytes_are_allowed(start):
    assert mask(start("a")) == [0, SMALL_TWIN]


def test_a_character_may_arrive_in_halves_by_id_and_by_bytes(start):
    for first in (lambda m: m.accept(SMALL_HALF_FIRST), lambda m: m.accept_bytes(b"\xc3")):
        matcher = start("éa")
        assert first(matcher)
        assert mask(matcher) == [SMALL_HALF_SECOND]
        assert not matcher.is_completed()
        assert matcher.accept_bytes(b"\xa9a")
        assert matcher.is_completed()


def test_what_is_certain_may_end_inside_a_character(start):
    matcher = start("a(é|è)")
    assert matcher.certain() == b"a\xc3"
    assert matcher.accept_bytes(b"a\xc3")
    assert matcher.certain() == b""


def test_nul_bytes_are_bytes_like_any_other(engine):
    matcher = engine.compile(GrammarKey("choice", '["a\\u0000b"]')).matcher()
    assert matcher.certain() == b"a\x00b"
    assert not matcher.accept_bytes(b"a\x01")
    assert matcher.accept_bytes(b"a\x00")
    assert mask(matcher) == [1]


def test_matchers_of_one_grammar_do_not_disturb_each_other(engine):
    grammar = engine.compile(GrammarKey("regex", "ab"))
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept(0)
    assert (mask(first), mask(second)) == ([1], [0, 3, SMALL_TWIN])


def test_a_compiled_grammar_knows_its_key_and_its_size(engine):
    key = GrammarKey("regex", "ab*c")
    grammar = engine.compile(key)
    assert grammar.key == key
    assert grammar.nbytes > 0


def test_a_source_that_is_none_is_a_grammar_error_that_names_field_and_value(engine):
    with pytest.raises(GrammarError, match=r"^structured_outputs\.regex: .+ \(got 'a\('\)$"):
        engine.compile(GrammarKey("regex", "a("))
