"""Tokens, their bytes, and facts that can be wound back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_lazy_grammar.core.transcript import Fed, Ledger, Transcript

_notes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.none() | st.integers(0, 2)), max_size=20)


def read(*pieces, context=b""):
    transcript = Transcript(context, 0)
    for token, piece in enumerate(pieces):
        transcript.push(token, piece)
    return transcript


@given(_notes, st.integers(0, 20))
def test_winding_back_restores_what_was_noted_before_the_step(notes, kept):
    steps = sorted(step for step, _, _ in notes)
    ledger, fresh = Ledger(), Ledger()
    for step, (_, name, value) in zip(steps, notes, strict=True):
        ledger.note(step, (0, name), value)
        if step < kept:
            fresh.note(step, (0, name), value)
    ledger.rewind(kept)
    assert ledger.facts == fresh.facts
    assert ledger.log == fresh.log


def test_noting_the_same_again_costs_nothing():
    ledger = Ledger()
    for step in range(100):
        ledger.note(step, (0, 0), 7)
    assert len(ledger.log) == 1


def test_the_tokens_past_a_byte_are_cut_there_and_those_without_bytes_left_out():
    transcript = read(b"ab", b"", b"cd", context=b"xy")
    assert transcript.fed(2) == (Fed(0, b"ab", whole=True), Fed(2, b"cd", whole=True))
    assert transcript.fed(3) == (Fed(0, b"b", whole=False), Fed(2, b"cd", whole=True))
    assert transcript.fed(4) == (Fed(2, b"cd", whole=True),)
    assert transcript.fed(6) == ()


def test_spans_begin_at_the_end_of_the_context():
    assert read(b"ab", b"", b"c", context=b"xy").spans() == ((0, 2), (2, 2), (2, 3))


def test_a_pop_takes_back_the_token_and_what_was_noted_for_it():
    transcript = read(b"ab", context=b"x")
    transcript.note((0, 0), 1)
    transcript.push(9, b"c")
    transcript.note((0, 0), 2)
    transcript.pop()
    assert (transcript.data, transcript.token, transcript.facts.get((0, 0))) == (b"xab", 0, 1)


def test_a_copy_does_not_move_with_the_original():
    transcript = read(b"ab")
    other = transcript.copy()
    transcript.push(1, b"c")
    transcript.note((0, 0), 1)
    assert (len(other), other.end, other.facts.get((0, 0)), other.fed(0)) == (1, 2, None, (Fed(0, b"ab", whole=True),))
