"""What the grammar drafts: the text that it knows, as tokens that it takes; and nothing moves."""

from __future__ import annotations

import pytest

from tests.core.kit import VOCABULARY, Workshop, feed, ids, row, state
from tests.core.windows import told
from vllm_lazy_grammar.core.drafts import TRIED, Drafts, LongestJoiner
from vllm_lazy_grammar.core.habits import Habits
from vllm_lazy_grammar.core.likely import Likely
from vllm_lazy_grammar.errors import ReplayRefusedError
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_END


def drafting(session, *keys, habits=None):
    schema = {"properties": {key: {} for key in keys}, "required": list(keys)}
    habits = habits or Habits(VOCABULARY)
    session.drafts = Drafts(VOCABULARY, LongestJoiner(VOCABULARY), Likely([schema]), habits, "json")
    return session


def test_certain_text_is_drafted_in_long_tokens_and_nothing_moves(shop):
    session = drafting(shop.session('\\{"abc":[12]+\\}'))
    before = state(session), told(session)
    assert session.draft(8) == ids("{", '"', "abc", '"', ":")
    assert (state(session), told(session)) == before


def test_no_more_is_drafted_than_there_is_room_for(shop):
    session = drafting(shop.session('\\{"abc":[12]+\\}'))
    assert [len(session.draft(n)) for n in range(4)] == [0, 1, 2, 3]


def test_it_goes_on_behind_the_proposers_drafts_and_not_behind_one_that_is_refused(shop):
    session = drafting(shop.session('\\{"abc":[12]+\\}'))
    assert session.draft(8, ids("{", '"')) == ids("abc", '"', ":")
    assert session.draft(8, ids("{", "b")) == []


def test_at_the_end_the_stop_id_is_drafted_where_nothing_else_is_legal(shop):
    session = drafting(shop.session("a[12]bc"))
    assert feed(session, "a")
    assert session.draft(8) == []
    assert feed(session, "1")
    assert session.draft(8) == [*ids("bc"), SMALL_END]
    assert drafting(shop.session("abc?")).draft(8) == ids("ab")


def test_optional_blanks_do_not_silence_drafts_and_are_set_as_before(shop):
    source = '\\{"a":[ \n]{0,2}"b",[ \n]{0,2}"c":[ \n]{0,2}"ab"\\}'
    session = drafting(shop.session(source))
    assert session.draft(30) == [
        *ids("{", '"', "a", '"', ":", '"', "b", '"', ",", '"', "c", '"', ":", '"', "ab", '"', "}"),
        SMALL_END,
    ]
    assert feed(session, "{", '"', "a", '"', ":", " ", '"')
    assert session.draft(9) == ids("b", '"', ",", " ", '"', "c", '"', ":", " ")


def test_of_several_keys_the_required_one_is_drafted(shop):
    session = drafting(shop.session('\\{"(?:b|ab|abc)":[12]\\}'), "c", "ab")
    assert session.draft(8) == ids("{", '"', "ab", '"', ":")
    assert drafting(shop.session('\\{"(?:b|abc)":[12]\\}')).draft(8) == ids("{", '"')


def test_a_key_that_was_begun_is_completed(shop):
    session = drafting(shop.session('\\{"(?:b|ab|abc)":[12]\\}'), "abc")
    assert feed(session, "{", '"', "a")
    assert session.draft(8) == ids("bc", '"', ":")


def test_while_awaiting_nothing_is_drafted_but_the_way_into_a_trigger_that_is_forced(shop):
    session = drafting(shop.session("<call>a1[12]", f"token:{SMALL_CALL}", mandatory=1, force_after=1))
    assert session.draft(8) == []
    assert feed(session, "b")
    assert session.draft(8) == [SMALL_CALL, *ids("a", "1")]


def test_a_forced_trigger_is_not_drafted_while_the_grammar_compiles(held):
    session = drafting(held.session("<call>a1[12]", f"token:{SMALL_CALL}", mandatory=1, force_after=1))
    assert feed(session, "b")
    assert session.draft(8) == []
    assert row(session)[0]


def test_a_free_string_drafts_nothing(shop):
    session = drafting(shop.session('"[abc]*"'))
    assert feed(session, '"', "a")
    assert session.draft(8) == []


def test_a_grammar_that_is_certain_for_ever_drafts_as_much_as_there_is_room_for():
    from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine

    shop = Workshop(engine=XgrammarEngine(VOCABULARY, max_threads=1), prewarm=0)
    assert drafting(shop.session('root ::= "a" root', kind="grammar")).draft(5) == ids("a") * 5


def test_drafts_that_are_refused_too_often_switch_themselves_off(shop):
    session = drafting(shop.session("abc1"))
    wrong = ids("a") + ids("b") * (TRIED - 1)
    session.drafts.judge(wrong, None)
    assert session.draft(8)
    session.drafts.judge(wrong, ids("a", "c"))
    assert session.draft(8) == []
    assert (session.drafts.offered, session.drafts.accepted) == (2 * TRIED, 1)


def test_text_that_was_taken_back_is_forgotten(shop):
    source = '\\{"a":[ \n]{0,2}1,[ \n]{0,2}"b":[ \n]{0,2}2\\}'
    session = drafting(shop.session(source))
    assert feed(session, "{", '"', "a", '"', ":", " ")
    assert session.draft(2) == ids("1", ",")
    session.rollback(1)
    assert session.draft(2) == ids("1", ",")
    assert session.draft(9) == ids("1", ",", '"', "b", '"', ":", "2", "}", "<end>")


def test_what_settling_raises_is_not_lost_in_a_question_for_drafts():
    shop = Workshop(threads=1, held=True)
    try:
        session = drafting(shop.session(r"<t>\{1\}", "word:<t>", on_reject="error"))
        assert feed(session, "b", "<t>", "a")
        shop.engine.release()
        session._compile.result()
        assert session.draft(4) == []
        assert session.num_offered == 3
        with pytest.raises(ReplayRefusedError):
            row(session)
    finally:
        shop.close()
