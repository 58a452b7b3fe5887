"""The fake is itself tested: what a person reads off an expression is what it answers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.errors import GrammarError
from vllm_lazy_grammar.testing import (
    SMALL_CALL,
    SMALL_EMPTY,
    SMALL_END,
    SMALL_HALF_FIRST,
    SMALL_HALF_SECOND,
    SMALL_SIZE,
    SMALL_TEXTS,
    SMALL_TWIN,
    FakeEngine,
    FakeMatcher,
    allowed_ids,
    small_vocabulary,
)


def matcher(expression: str) -> FakeMatcher:
    return FakeEngine(small_vocabulary()).compile(GrammarKey("regex", expression)).matcher()


def mask(position: FakeMatcher) -> list[int]:
    row = np.full(2, 0x55555555, dtype=np.int32)
    assert position.fill(row)
    return allowed_ids(row)


def test_the_small_vocabulary_is_what_its_names_say():
    vocabulary = small_vocabulary()
    assert [vocabulary.piece(token).decode() for token in range(len(SMALL_TEXTS))] == list(SMALL_TEXTS)
    assert vocabulary.piece(SMALL_HALF_FIRST) + vocabulary.piece(SMALL_HALF_SECOND) == "é".encode()
    assert vocabulary.piece(SMALL_TWIN) == vocabulary.piece(0) == b"a"
    assert vocabulary.piece(SMALL_EMPTY) == b""
    assert (vocabulary.piece(SMALL_CALL), vocabulary.piece(SMALL_END)) == (b"<call>", b"<end>")
    assert vocabulary.special_ids == {SMALL_CALL, SMALL_END}
    assert vocabulary.size == SMALL_SIZE
    assert [vocabulary.piece(token) for token in range(27, 40)] == [b""] * 13


def test_a_mask_holds_every_token_that_goes_on_and_no_other():
    position = matcher("ab*c|é")
    assert mask(position) == [0, 3, 4, 20, SMALL_HALF_FIRST, SMALL_TWIN]
    assert position.accept(3)
    assert mask(position) == [1, 2, 5]


def test_special_tokens_are_never_taken_by_id_even_where_their_text_is_legal():
    position = matcher(r"<call>|[\x00-\x7f]*")
    assert SMALL_CALL not in mask(position)
    assert not position.accept(SMALL_CALL)
    assert position.accept_bytes(b"<call>")


def test_a_character_may_arrive_in_halves():
    position = matcher("é")
    assert position.accept(SMALL_HALF_FIRST)
    assert mask(position) == [SMALL_HALF_SECOND]
    assert not position.is_completed()
    assert position.accept(SMALL_HALF_SECOND)
    assert position.is_completed()


def test_what_is_certain_ends_where_there_is_a_choice():
    position = matcher("<t>(?:12|1a)")
    assert position.certain() == b"<t>1"
    assert position.accept_bytes(b"<t>1")
    assert position.certain() == b""


def test_what_is_certain_is_empty_where_the_grammar_may_end():
    position = matcher("a(?:bc)?")
    assert position.certain() == b"a"
    assert position.accept(0)
    assert position.certain() == b""


def test_a_choice_is_taken_literally():
    position = FakeEngine(small_vocabulary()).compile(GrammarKey("choice", '["a", "{1}"]')).matcher()
    assert mask(position) == [0, 6, SMALL_TWIN]


def test_fills_are_counted_on_the_matcher_that_was_asked():
    position = matcher("a*")
    mask(position)
    fork = position.fork()
    mask(fork)
    assert (position.fills, fork.fills) == (1, 2)


def test_an_expression_that_does_not_compile_is_a_grammar_error_that_names_the_field():
    with pytest.raises(GrammarError, match=r"structured_outputs\.regex: "):
        matcher("a(")


def test_a_kind_that_the_fake_does_not_know_is_a_grammar_error():
    with pytest.raises(GrammarError, match=r"structured_outputs\.json: "):
        FakeEngine(small_vocabulary()).compile(GrammarKey("json", "{}"))


def test_a_held_compile_waits_until_it_is_released():
    engine = FakeEngine(small_vocabulary(), held=True)
    key = GrammarKey("regex", "a")
    done: list[object] = []
    worker = threading.Thread(target=lambda: done.append(engine.compile(key)))
    worker.start()
    assert engine.waiting.wait(5)
    assert (engine.compiled, done) == ([key], [])
    engine.release()
    worker.join(5)
    assert len(done) == 1
