"""The session's contract, rule by rule, on a vocabulary that can be checked by eye."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.kit import VOCABULARY, Workshop, allowed_texts, feed, ids, row, state
from vllm_lazy_grammar.core.completion import NoWay
from vllm_lazy_grammar.core.journal import Phase
from vllm_lazy_grammar.errors import ReplayRefusedError, RequestError
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_EMPTY, SMALL_END, SMALL_SIZE, SMALL_TEXTS, SMALL_TWIN

DIGITS = "<t>[12]+"


@pytest.fixture
def shop():
    shop = Workshop()
    yield shop
    shop.close()


@pytest.fixture
def held():
    shop = Workshop(threads=1, held=True)
    yield shop
    shop.close()


# -- states ------------------------------------------------------------------------------------------------------------


def test_awaiting_masks_nothing_and_may_end(shop):
    session = shop.session("abc", "word:<t>", on_reject="disarm")
    assert feed(session, "a", "{", " ")
    assert row(session) == (False, list(range(32 * VOCABULARY.row_words)))
    assert not session.blocks_stop()
    assert session.buffer == b"a{ "


def test_awaiting_and_mandatory_masks_the_stop_ids_only(shop):
    session = shop.session("<t>a", "word:<t>", mandatory=1, on_reject="disarm")
    masks, allowed = row(session)
    assert masks
    assert SMALL_END not in allowed
    assert set(ids("a", "<t>", "<")) <= set(allowed)
    assert session.blocks_stop()


def test_a_grammar_without_a_trigger_dies_on_the_prose_that_the_lazy_one_lets_pass(shop):
    eager, lazy = shop.session(DIGITS), shop.session(DIGITS, "word:<t>")
    assert not eager.accept(*ids("a"))
    assert feed(lazy, "a", "b", "<t>")
    assert allowed_texts(lazy) == ["1", "12", "2"]


def test_inside_the_row_is_the_matchers_without_stop_ids_until_it_may_end(shop):
    session = shop.session("ab?")
    assert allowed_texts(session) == ["a", "ab"]
    assert session.blocks_stop()
    feed(session, "a")
    assert allowed_texts(session) == ["<end>", "b"]
    assert not session.blocks_stop()


def test_finished_the_row_is_the_stop_ids(shop):
    session = shop.session("a")
    feed(session, "a")
    assert allowed_texts(session) == ["<end>"]
    assert session.forced_token() == SMALL_END


def test_a_complete_grammar_is_not_terminated_and_a_stop_id_ends_it(shop):
    session = shop.session("a")
    feed(session, "a")
    assert not session.is_terminated()
    assert session.accept(SMALL_END)
    assert session.is_terminated()
    assert row(session)[0] is False
    assert session.accept(0)


def test_a_token_that_runs_past_the_end_of_the_grammar_is_masked(shop):
    session = shop.session("<t>a", "word:<t>")
    feed(session, "<t>")
    assert allowed_texts(session) == ["a"]


# -- accept ------------------------------------------------------------------------------------------------------------


def test_a_refused_token_and_an_id_outside_the_vocabulary_change_nothing(shop):
    session = shop.session("abc")
    feed(session, "a")
    before = state(session)
    for token in (*ids("a", "{"), SMALL_SIZE, -1, 10**9, SMALL_EMPTY, SMALL_CALL):
        assert not session.accept(token)
        assert state(session) == before


def test_a_stop_id_inside_is_accepted_and_masked_and_terminates_nothing(shop):
    session = shop.session("abc")
    feed(session, "a")
    assert not session.is_allowed(SMALL_END)
    assert session.accept(SMALL_END)
    assert not session.is_terminated()
    assert feed(session, "b", "c")


def test_a_stop_id_that_spells_a_quote_can_not_end_the_answer_inside_a_string(shop):
    quote = ids('"')[0]
    session = shop.session('"[ab]*"', stops=(quote, SMALL_END))
    assert session.validate([quote]) == []
    inside = shop.session('[ab]*"c', stops=(quote, SMALL_END))
    feed(inside, "a")
    assert '"' not in allowed_texts(inside)
    assert inside.blocks_stop()


def test_stop_ids_that_leave_no_token_are_an_error_that_names_them(shop):
    quote = ids('"')[0]
    session = shop.session('"[ab]*"', stops=(quote, SMALL_END))
    with pytest.raises(RequestError, match=rf"stop_token_ids: .*\[{quote}\]"):
        row(session)


def test_a_stop_id_that_is_the_grammars_end_marker_is_fed_and_ends_the_turn(shop):
    session = shop.session("a<end>")
    feed(session, "a")
    assert allowed_texts(session) == ["<", "<end>"]
    assert session.accept(SMALL_END)
    assert session.is_terminated()
    assert session.num_history_steps == 2


def test_a_control_token_is_fed_where_a_literal_spells_it_and_masked_in_free_text(shop):
    session = shop.session("<call>[a-z<>]*")
    assert allowed_texts(session)[:2] == ["<", "<call>"]
    assert session.accept(SMALL_CALL)
    assert "<call>" not in allowed_texts(session)
    assert not session.accept(SMALL_CALL)


def test_two_ids_with_the_same_bytes_are_both_taken(shop):
    session = shop.session("aa")
    assert session.accept(SMALL_TWIN)
    assert session.accept(0)


# -- firing and settling -----------------------------------------------------------------------------------------------


def test_the_straddling_token_keeps_only_the_bytes_of_the_match(shop):
    session = shop.session("bcab", "word:bc")
    assert session.accept(*ids("abc"))
    assert session.phase is Phase.INSIDE
    assert allowed_texts(session) == ["a", "ab"]


def test_the_replay_is_exactly_the_triggers_tokens(shop):
    session = shop.session(DIGITS, "word:<t>")
    feed(session, "é", "<", "t", ">")
    assert session.num_history_steps == 3
    assert session.trace.describe() == "fired at token 3 by word:<t>"


def test_grammar_start_after_begins_the_grammar_behind_the_marker(shop):
    session = shop.session("[12]+", "word:<t>", start="after")
    feed(session, "a", "<t>")
    assert session.num_history_steps == 0
    assert allowed_texts(session) == ["1", "12", "2"]


def test_a_token_trigger_fires_on_its_id_alone_and_discards_the_buffer(shop):
    session = shop.session("<call>a", f"token:{SMALL_CALL}")
    feed(session, "<", "a", "b")
    assert session.phase is Phase.AWAITING
    assert session.accept(SMALL_CALL)
    assert session.buffer == b""
    assert allowed_texts(session) == ["a"]


def test_a_firing_accept_never_waits_for_a_compile(held):
    session = held.session(DIGITS, "word:<t>")
    held.engine.waiting.wait()
    assert feed(session, "a", "<t>", "1")
    assert session.phase is Phase.PENDING
    assert session.validate(ids("2")) == []
    assert session.forced_token() is None
    held.engine.release()
    assert allowed_texts(session) == ["1", "12", "2", "<end>"]
    assert session.num_history_steps == 2


def test_whether_a_lone_trigger_token_opens_the_grammar_is_answered_without_its_compile(held):
    session = held.session("<call>a", f"token:{SMALL_CALL}")
    held.engine.waiting.wait()
    assert [session.opens(token) for token in (SMALL_CALL, *ids("a"), SMALL_END, SMALL_SIZE)] == [
        True, False, False, False,
    ]  # fmt: skip
    assert session.validate([SMALL_CALL]) == []
    assert (session.phase, session.num_offered, session.buffer) == (Phase.AWAITING, 0, b"")
    held.engine.release()
    session._compile.result()
    assert not session.opens(SMALL_CALL)
    assert session.validate([SMALL_CALL]) == [SMALL_CALL]


def test_a_lazy_requests_rows_before_its_trigger_join_no_compile(held):
    session = held.session(DIGITS, "word:<t>")
    held.engine.waiting.wait()
    assert row(session)[0] is False
    assert not session.blocks_stop()
    assert session.trace.joined_seconds == 0


def test_a_token_kept_while_pending_that_the_grammar_refuses_disarms_the_trigger(held):
    session = held.session(DIGITS, "word:<t>")
    feed(session, "<t>", "a", "<t>")
    held.engine.release()
    assert allowed_texts(session) == ["1", "12", "2"]
    assert [(e.kind, e.token) for e in session.trace.events] == [("refused", 0), ("fired", 2)]


def test_rolling_back_a_settled_firing_leaves_it_awaiting(held):
    session = held.session(DIGITS, "word:<t>")
    feed(session, "a", "<", "t", ">", "1")
    held.engine.release()
    row(session)
    session.rollback(2)
    assert session.phase is Phase.AWAITING
    assert session.buffer == b"a<t"


# -- on_reject ---------------------------------------------------------------------------------------------------------


def masked_texts(session):
    """The texts of SMALL_TEXTS that the row masks, sorted."""
    _, allowed = row(session)
    return sorted(text for token, text in enumerate(SMALL_TEXTS) if token not in allowed)


def test_forbid_masks_a_token_whose_every_match_the_grammar_refuses(shop):
    session = shop.session("bc1", "word:ab")
    feed(session, "{")
    assert masked_texts(session) == ["ab", "abc"]
    feed(session, "a")
    assert masked_texts(session) == ["ab", "abc", "b", "bc"]


def test_forbid_masks_only_the_tokens_that_the_grammar_refuses_behind_the_trigger(shop):
    session = shop.session("ab1", "word:ab")
    feed(session, "{")
    assert masked_texts(session) == ["abc"]
    feed(session, "ab")
    assert allowed_texts(session) == ["1"]


def test_disarm_goes_on_waiting_when_the_grammar_refuses_the_replay(shop):
    session = shop.session("abc1", "word:a", on_reject="disarm")
    assert feed(session, "abc")
    assert session.phase is Phase.INSIDE
    session.reset()
    other = shop.session("ab1", "word:a", on_reject="disarm")
    assert feed(other, "abc")
    assert other.phase is Phase.AWAITING
    assert other.buffer == b"abc"
    assert feed(other, "ab", "1")
    assert other.phase is Phase.INSIDE


def test_error_ends_that_request_and_poisons_nothing(shop):
    session = shop.session("ab1", "word:a", on_reject="error")
    feed(session, "{")
    before = state(session)
    with pytest.raises(ReplayRefusedError, match="abc"):
        session.accept(*ids("abc"))
    assert state(session) == before


# -- re-arming ---------------------------------------------------------------------------------------------------------


def test_at_may_end_the_next_token_is_the_grammars_if_it_takes_it_else_the_gate_waits_again(shop):
    session = shop.session(DIGITS, "word:<t>", rearm=1)
    assert feed(session, "<t>", "1")
    assert session.phase is Phase.INSIDE
    assert row(session)[0] is False
    assert feed(session, "2")
    assert session.num_history_steps == 3
    assert feed(session, "a")
    assert session.phase is Phase.AWAITING
    assert session.buffer == b"a"
    assert feed(session, "<t>")
    assert allowed_texts(session) == ["1", "12", "2"]


def test_finished_with_rearm_awaits_again_at_once(shop):
    session = shop.session("<t>1", "word:<t>", rearm=1)
    assert feed(session, "<t>", "1")
    assert session.phase is Phase.AWAITING
    assert session.buffer == b""
    assert session.trace.describe() == "fired at token 0 by word:<t>; re-armed at token 1"


def test_at_the_last_activation_only_stopping_is_left(shop):
    session = shop.session("<t>1", "word:<t>", rearm=1, max_activations=2)
    feed(session, "<t>", "1", "a", "<t>", "1")
    assert allowed_texts(session) == ["<end>"]


def test_prose_call_prose_call_stop_constrains_both_calls_and_stops_after_each(shop):
    session = shop.session("<t>12", "word:<t>", rearm=1, mandatory=1)
    assert session.blocks_stop()
    for _ in range(2):
        feed(session, "a", "<t>")
        assert allowed_texts(session) == ["1", "12"]
        assert session.blocks_stop()
        feed(session, "1", "2")
        assert not session.blocks_stop()
    assert session.accept(SMALL_END)
    assert session.is_terminated()


def test_a_run_of_tokens_can_be_taken_back_across_a_rearm(shop):
    session = shop.session("<t>1", "word:<t>", rearm=1)
    states = [state(session)]
    tokens = ids("a", "<", "t", ">", "1", "b", "<t>", "1", "<end>")
    for token in tokens:
        assert session.accept(token)
        states.append(state(session))
    for expected in reversed(states[:-1]):
        session.rollback(1)
        assert state(session) == expected


# -- rows, rollback and the rest ---------------------------------------------------------------------------------------


def test_rollback_of_more_than_was_offered_raises_naming_both_and_changes_nothing(shop):
    session = shop.session("abc")
    feed(session, "a")
    before = state(session)
    with pytest.raises(ValueError, match="rollback of 2 tokens, but 1 were offered"):
        session.rollback(2)
    assert state(session) == before


def test_a_second_fill_at_the_same_position_copies(shop):
    session = shop.session("[ab]+c")
    feed(session, "a")
    first = row(session)
    spent = session.trace.fill_seconds
    assert row(session) == first
    assert session.trace.fill_seconds == spent


def fills(session):
    """How often the session's matcher made a row."""
    return session._walk.at.matcher.fills


@pytest.mark.parametrize(("prewarm", "made"), [(8, 0), (0, 1)])
def test_prewarmed_the_first_fill_compiles_nothing_and_costs_a_copy(prewarm, made):
    shop = Workshop(prewarm=prewarm)
    session = shop.session("abc|abb")
    for text in ("", "a", "b"):
        before = 0 if not text else fills(session)
        assert feed(session, *([text] if text else []))
        assert allowed_texts(session)
        assert fills(session) - before == made
    assert [key.source for key in shop.engine.compiled] == ["abc|abb"]


def test_time_filling_and_finding_forced_tokens_is_two_phases_and_a_copied_row_records_nothing(shop):
    session = shop.session("(?:a|b)1")
    trace = session.trace
    row(session)
    assert trace.fill_seconds > 0
    assert trace.forced_seconds == 0
    feed(session, "b")
    filled = trace.fill_seconds
    assert session.forced_token() == ids("1")[0]
    assert trace.fill_seconds > filled
    assert trace.forced_seconds > 0
    spent = trace.fill_seconds, trace.forced_seconds
    row(session)
    session.forced_token()
    assert (trace.fill_seconds, trace.forced_seconds) == spent


def test_a_forced_token_is_the_single_legal_one_and_there_is_none_while_awaiting_or_terminated(shop):
    eager, lazy = shop.session("(?:a|b)1"), shop.session("<t>1", "word:<t>", mandatory=1, force_after=0)
    assert eager.forced_token() is None
    assert lazy.forced_token() is None
    feed(eager, "b")
    feed(lazy, "<t>")
    assert eager.forced_token() == lazy.forced_token() == ids("1")[0]
    feed(eager, "1", "<end>")
    assert eager.is_terminated()
    assert eager.forced_token() is None


def test_looking_for_a_forced_token_never_fills_twice():
    session = Workshop(prewarm=0).session("(?:a|b)1")
    feed(session, "b")
    before = fills(session)
    row(session)
    for _ in range(3):
        session.forced_token()
    assert fills(session) - before == 1


def test_an_accept_drops_the_row_even_one_that_does_not_move():
    session = Workshop(prewarm=0).session("[ab]+c")
    first, before = row(session), fills(session)
    assert not session.accept(*ids("1"))
    assert row(session) == first
    assert fills(session) - before == 1


def test_is_allowed_goes_by_the_positions_row_and_is_false_beyond_it(shop):
    session = shop.session("[ab]+c")
    assert [session.is_allowed(token) for token in ids("a", "b", "c", "1")] == [True, True, False, False]
    feed(session, "a")
    assert session.is_allowed(*ids("c"))
    free = shop.session("[ab]+c", "word:<t>", on_reject="disarm")
    assert row(free)[0] is False
    for beyond in (SMALL_SIZE, 32 * VOCABULARY.row_words, 10**9, -1, -SMALL_SIZE):
        assert not session.is_allowed(beyond)
        assert not free.is_allowed(beyond)


def test_a_row_that_is_not_kept_is_made_anew_and_is_the_same(shop):
    session = shop.session("[ab]+c")
    feed(session, "a")
    kept, fresh = np.zeros(session._row_words, np.int32), np.zeros(session._row_words, np.int32)
    assert session.fill(fresh, keep=False)
    spent = session.trace.fill_seconds
    assert session.fill(kept)
    assert session.trace.fill_seconds > spent
    assert kept.tolist() == fresh.tolist()


def test_rollback_of_nothing_only_drops_the_row(shop):
    session = shop.session("[ab]+c")
    feed(session, "a")
    first, spent = row(session), session.trace.fill_seconds
    session.rollback(0)
    assert row(session) == first
    assert session.trace.fill_seconds > spent


def test_a_row_that_masks_anything_masks_padding_and_special_tokens(shop):
    _, allowed = row(shop.session("[\\s\\S]*"))
    assert max(allowed) < 27
    assert SMALL_CALL not in allowed


def test_validate_moves_nothing_and_stops_behind_a_terminating_token(shop):
    session = shop.session("ab?")
    before = state(session)
    assert session.validate([*ids("a"), SMALL_END, *ids("b")]) == [*ids("a"), SMALL_END]
    assert session.validate([SMALL_END]) == []
    assert state(session) == before


def test_validate_settles_a_compile_that_has_come_and_offers_nothing_for_good(held):
    session = held.session("<t>[0-9]", "word:<t>")
    assert feed(session, "a", "<t>")
    assert session.phase is Phase.PENDING
    held.engine.release()
    session._compile.result()
    assert session.validate(ids("1", "a")) == ids("1")
    assert (session.phase, session.num_offered) == (Phase.INSIDE, 2)


def test_a_kept_token_that_does_not_fit_has_the_firing_before_it_refused_and_the_next_one_fires(held):
    session = held.session("<t>1", "word:<t>", on_reject="disarm")
    assert feed(session, "<t>", "<t>", "1")
    held.engine.release()
    session._compile.result()
    row(session)
    assert session.phase is Phase.INSIDE
    assert [(e.kind, e.token) for e in session.trace.events[-2:]] == [("refused", 0), ("fired", 1)]


def test_validate_simulates_the_gate_and_leaves_it_awaiting(shop):
    session = shop.session(DIGITS, "word:<t>")
    assert session.validate(ids("a", "<t>", "1", "a")) == ids("a", "<t>", "1")
    assert session.phase is Phase.AWAITING
    assert session.buffer == b""


def test_reset_goes_back_to_the_start_gate_included(shop):
    session = shop.session(DIGITS, "word:<t>")
    start = state(session)
    feed(session, "a", "<t>", "1")
    session.reset()
    assert state(session) == start


def test_a_fork_is_independent_and_has_the_same_history(shop):
    session = shop.session(DIGITS, "word:<t>", rearm=1)
    feed(session, "a", "<t>", "1")
    twin = session.fork()
    assert state(twin) == state(session)
    before = state(session)
    twin.rollback(2)
    assert twin.buffer == b"a"
    assert state(session) == before


def test_apply_masks_what_the_row_masks_and_leaves_the_rest(shop):
    session = shop.session("[ab]")
    logits = np.full(SMALL_SIZE + 3, 2.0, np.float32)
    session.apply(logits)
    assert [t for t in range(SMALL_SIZE) if np.isfinite(logits[t])] == [*ids("a", "b"), SMALL_TWIN]
    assert (logits[SMALL_SIZE:] == 2).all()


def test_a_request_without_any_stop_id_may_always_end(shop):
    assert not shop.session("abc", stops=()).blocks_stop()


def test_with_ignore_eos_nothing_is_masked_behind_an_accepted_stop_id(shop):
    session = shop.session("a")
    feed(session, "a", "<end>", "b", "c")
    assert row(session)[0] is False


def test_a_row_never_depends_on_how_much_was_generated_before(shop):
    long, short = (shop.session("ab1", "word:a", mandatory=1) for _ in range(2))
    for _ in range(64 * 1024):
        assert long.accept(*ids("{"))
    feed(short, "{")
    assert len(long.buffer) == 64 * 1024
    assert row(long) == row(short)
    assert "abc" not in allowed_texts(long)


# -- the shortest way out ----------------------------------------------------------------------------------------------


def out(session, max_bytes=50):
    before = state(session)
    found = session.completion(max_bytes)
    assert state(session) == before
    return found


def test_the_way_out_is_empty_where_the_turn_may_end(shop):
    assert out(shop.session("<t>1", "word:<t>")).tokens == ()
    done = shop.session("a")
    feed(done, "a")
    assert out(done).tokens == ()


def test_the_way_out_has_the_fewest_tokens_then_the_fewest_bytes(shop):
    assert out(shop.session("abc|12|1b")).tokens == tuple(ids("12"))
    assert out(shop.session("aab|ab1|bca")).tokens == tuple(ids("a", "ab"))


def test_there_is_no_way_out_in_too_few_bytes(shop):
    assert isinstance(out(shop.session("abcabc"), 5), NoWay)


def test_awaiting_and_mandatory_the_way_out_is_trigger_and_shortest_call(shop):
    session = shop.session("<t>12?", "word:<t>", mandatory=1)
    feed(session, "a")
    assert out(session).text == b"<t>1"
    for token in out(session).tokens:
        session.accept(token)
    assert session.stop_legal()


def test_there_is_no_way_out_through_a_trigger_that_the_grammar_refuses(shop):
    for on_reject in ("error", "disarm"):
        assert isinstance(out(shop.session("[12]2", "word:<t>", mandatory=1, on_reject=on_reject)), NoWay)


def test_a_way_through_a_control_token_is_found(shop):
    session = shop.session("<call>a<end>", f"token:{SMALL_CALL}", mandatory=1)
    assert out(session).tokens == tuple(ids("<call>", "a", "<end>"))


def test_a_row_behind_a_trigger_never_waits_for_the_compiles_of_others():
    shop = Workshop(threads=1)
    try:
        with shop.worker.held():  # as if others had all threads
            session = shop.session("<t>[12]", "word:<t>")
            assert feed(session, "<t>")
            assert row(session)[1] == sorted(ids("1", "2"))
    finally:
        shop.close()
