"""What was written where something else was drafted is drafted the next time."""

from __future__ import annotations

from tests.core.kit import VOCABULARY, ids
from vllm_lazy_grammar.core.blank_style import BlankStyle
from vllm_lazy_grammar.core.habits import Habits


def test_a_token_that_the_model_splits_is_split_until_it_writes_it_whole_again():
    habits = Habits(VOCABULARY)
    drafts = ids("abc", "1")
    assert habits.judge(drafts, ids("a"), 2) == 0
    assert habits.written(drafts, open_end=False) == ids("a", "bc", "1")
    assert habits.judge(ids("a", "bc"), ids("abc"), 2) == 0
    assert habits.written(drafts, open_end=False) == drafts


def test_a_last_token_that_mostly_becomes_a_longer_one_is_left_out_where_the_end_is_open():
    habits = Habits(VOCABULARY)
    assert habits.judge(ids("1", "a"), ids("1", "ab"), 2) == 1
    assert habits.written(ids("1", "a"), open_end=True) == ids("1")
    assert habits.written(ids("1", "a"), open_end=False) == ids("1", "a")
    habits.judge(ids("b", "a"), ids("b", "a"), 2)
    assert habits.written(ids("1", "a"), open_end=True) == ids("1", "a")


def test_another_text_teaches_nothing():
    habits = Habits(VOCABULARY)
    assert habits.judge(ids("a", "b"), ids("1"), 2) == 0
    assert habits.judge(ids("a", "<end>"), [*ids("a"), 39], 2) == 1
    assert habits.written(ids("a", "b"), open_end=True) == ids("a", "b")


def test_a_draft_that_the_model_was_not_given_teaches_nothing():
    habits = Habits(VOCABULARY)
    assert habits.judge(ids("1", "abc"), ids("1", "a"), 1) == 1
    assert habits.judge(ids("1", "b"), ids("1", "bc"), 1) == 1
    assert habits.written(ids("1", "abc", "b"), open_end=True) == ids("1", "abc", "b")


def test_the_blanks_of_the_last_answer_of_a_kind_begin_the_next():
    habits, style = Habits(VOCABULARY), BlankStyle()
    style.read(b'{\n  "a": 1,\n  "b": {')
    habits.saw("json", style)
    fresh = habits.style("json")
    assert (fresh.colon, fresh.indent, fresh.path) == (b" ", b"  ", [])
    assert habits.style("structural_tag") == BlankStyle()
