"""The cases of the specification of drafts, on sessions that can be checked by eye."""

from __future__ import annotations

import itertools

import pytest

from tests.core.kit import ENDS, feed, ids, row, state
from tests.core.windows import told
from vllm_lazy_grammar.testing import SMALL_END


def test_s1_drafts_that_open_a_fence_are_trimmed_to_nothing_and_the_session_lives(shop):
    session = shop.session("", kind="json_object")
    assert session.validate(ids("a", "b", "\n", "{")) == []
    assert feed(session, "{", "}")


@pytest.mark.parametrize("options", [{}, {"rearm": 1}])
def test_s3_every_prefix_taken_back_to_every_position_equals_a_fresh_session(shop, options):
    window = ids("a", "<t>", "1", "2", "<end>", "b")

    def fresh(n):
        session = shop.session("<t>[12]+", "word:<t>", **options)
        assert all(map(session.accept, window[:n]))
        return session

    for taken, kept in itertools.combinations_with_replacement(range(len(window), -1, -1), 2):
        session = fresh(taken)
        row(session)
        session.rollback(taken - kept)
        assert state(session) == state(fresh(kept))
        assert told(session) == told(fresh(kept))


def test_s5_a_session_that_terminated_inside_the_window_is_taken_back_and_fills_again(shop):
    session = shop.session("a[12]")
    assert feed(session, "a", "1")
    before = row(session)
    assert session.validate(ids("<end>", "a")) == ids("<end>")
    assert session.accept(SMALL_END)
    assert session.is_terminated()
    assert row(session)[0] is False
    session.rollback(1)
    assert row(session) == before


def test_a_draft_that_fires_while_the_grammar_compiles_is_trimmed_so_that_no_row_waits_for_it(held):
    session = held.session("<t>[12]+", "word:<t>")
    assert session.validate(ids("a", "<t>", "1")) == ids("a")
    assert session.validate(ids("<t>", "1")) == []
    assert row(session) == (False, row(session)[1])


def test_a_draft_whose_replay_the_grammar_refuses_ends_no_request_however_late_the_compile(held):
    session = held.session("<t>1", "word:<t>", "word:ab", on_reject="error")
    drafts = session.validate(ids("ab", "b"))
    held.engine.release()
    session._compile.join_rows()
    assert all(map(session.accept, drafts))
    session.rollback(len(drafts))
    assert session.validate(ids("c", "ab")) == ids("c")


def test_the_trace_tells_nothing_that_was_taken_back(shop):
    session = shop.session("<t>1", "word:<t>", rearm=1)
    assert feed(session, "a", "<t>", "1")
    assert [event.kind for event in session.trace.events] == ["fired", "rearmed"]
    session.rollback(2)
    assert session.trace.describe() == "never fired"


def test_a_masked_stop_id_is_no_draft_and_one_that_ends_the_turn_is_the_last(shop):
    session = shop.session("a[12]", stops=ENDS)
    assert session.validate([SMALL_END]) == []
    assert session.validate([*ids("a", "2"), SMALL_END, *ids("a")]) == [*ids("a", "2"), SMALL_END]
