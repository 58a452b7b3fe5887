from __future__ import annotations

import time

import pytest

from vllm_lazy_grammar.core.vocabulary import Vocabulary

ADDED = {"<|end|>": 3, "<call>": 4, "\u2581\u2581": 5, "<beyond>": 9}


def small() -> Vocabulary:
    return Vocabulary([b"a", b"b", b"a", b"", b"<call>", b"  "], 8, special_ids=[3, 5, 9], added=ADDED, eos_ids=[3, 9])


def test_a_piece_is_the_bytes_of_the_id():
    assert [small().piece(token) for token in (0, 1, 2, 4)] == [b"a", b"b", b"a", b"<call>"]


@pytest.mark.parametrize("token", [6, 7, 8, 9, -1])
def test_padding_and_ids_that_do_not_exist_have_no_bytes(token):
    assert small().piece(token) == b""


def test_a_special_tokens_piece_is_its_text():
    assert small().piece(3) == b"<|end|>"
    assert (
        Vocabulary([b"garbled"], 1, special_ids=[0], added={"<\uff5cend\uff5c>": 0}).piece(0)
        == "<\uff5cend\uff5c>".encode()
    )


def test_ids_at_or_beyond_the_models_vocabulary_do_not_exist():
    short = Vocabulary([b"a", b"b", b"<x>"], 2, special_ids=[2], added={"<x>": 2}, eos_ids=[2])
    assert [token in short for token in (-1, 0, 1, 2)] == [False, True, True, False]
    assert (short.pieces, dict(short.added), short.special_ids, short.eos_ids) == (
        (b"a", b"b"),
        {},
        frozenset(),
        frozenset(),
    )
    assert short.token_of("<x>") is None


def test_padding_exists():
    assert 7 in small()


def test_rows_are_as_wide_as_the_models_vocabulary():
    assert [Vocabulary([], size).row_words for size in (1, 31, 32, 33, 151936)] == [1, 1, 1, 2, 4748]


def test_control_tokens_are_added_tokens_that_are_special():
    assert small().special_ids == {3}


def test_control_tokens_are_added_tokens_that_a_preset_or_a_trigger_names():
    assert small().named(["<call>", "a", "<beyond>", "nowhere"]) == {4}


def test_runs_of_whitespace_among_the_added_tokens_are_not_control_tokens():
    vocabulary = Vocabulary([b"\n\n", b"  "], 2, special_ids=[0, 1], added={"\n\n": 0, "\u2581\u2581": 1})
    assert vocabulary.special_ids == frozenset()
    assert vocabulary.named(["\n\n", "\u2581\u2581"]) == frozenset()
    assert vocabulary.piece(1) == b"  "


def test_token_of_finds_the_lowest_id_with_exactly_this_text():
    assert small().token_of("a") == 0
    assert small().token_of("ab") is None
    assert small().token_of("") is None


def test_token_of_prefers_an_added_token():
    assert Vocabulary([b"<x>", b"<x>"], 2, added={"<x>": 1}).token_of("<x>") == 1


def test_the_control_text_of_an_added_token_is_its_text_and_of_any_other_its_piece():
    assert [small().control_text(token) for token in (3, 4, 0, 7)] == [b"<|end|>", b"<call>", b"a", b""]


def test_end_ids_are_those_that_exist():
    assert small().eos_ids == {3}


@pytest.mark.long
def test_a_large_vocabulary_is_built_in_half_a_second():
    pieces = [token.to_bytes(4, "big") for token in range(151_669)]
    start = time.perf_counter()
    vocabulary = Vocabulary(pieces, 151_936)
    assert time.perf_counter() - start < 0.5
    assert vocabulary.token_of("\0\0\0a") == 97
