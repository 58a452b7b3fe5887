"""Nothing is lost in a draft window: rows, phase, events and text are those of a session that saw only what was accepted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import ENDS, VOCABULARY, Workshop, ids, row
from tests.core.windows import WINDOWS, Run, told
from vllm_lazy_grammar.core.drafts import Drafts, LongestJoiner
from vllm_lazy_grammar.core.habits import Habits
from vllm_lazy_grammar.core.likely import Likely
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import LazyGrammarError
from vllm_lazy_grammar.testing import SMALL_CALL, FakeMatcher, allowed_ids

KINDS = {
    "eager": (r'\{"[abc]*":[12]+\}', (), {}),
    "eager, short": (r"ab[12]", (), {}),
    "eager, marked": ("<call>[abc]*<end>[12]*", (), {}),
    "word": ("<t>[12]+", ("word:<t>",), {}),
    "two words": ("(?:<t>[12]+|ab[12])", ("word:<t>", "word:ab"), {"on_reject": "disarm"}),
    "an error": ("<t>1[12]", ("word:<t>",), {"on_reject": "error", "rearm": 1}),
    "rearm": ("<t>[12]+", ("word:<t>",), {"rearm": 1}),
    "rearm twice": ("<t>1", ("word:<t>",), {"rearm": 1, "max_activations": 2, "mandatory": 1}),
    "a long call": (r"<t>\{[abc]*(?:<t>[abc]+)?\}", ("word:<t>",), {"rearm": 1}),
    "token": ("<call>a<end>", (f"token:{SMALL_CALL}",), {"rearm": 1}),
    "after": ("[ab]+1", ("pattern:t(>)",), {"start": "after"}),
    "pattern": ("(?:bc|c)1", ("pattern:a(b?c)",), {"on_reject": "disarm", "rearm": 1}),
    "forced": ("<t>[12]", ("word:<t>",), {"mandatory": 1, "force_after": 3}),
    "a quote ends it": (r'\{"?[abc]*"?:[12]+\}', (), {"stops": (*ENDS, *ids('"'))}),
}
POOL = ids("<t>", "<", "t", ">", "1", "2", "12", "a", "b", "c", "ab", "bc", '"', "{", "}", ":", "<call>", "<end>")


def make(shop, kind):
    source, triggers, options = KINDS[kind]
    return lambda: shop.session(source, *triggers, **options)


def own_drafts():
    return Drafts(VOCABULARY, LongestJoiner(VOCABULARY), Likely([]), Habits(VOCABULARY), "regex")


def check(kind, examples):
    shop, at_once = Workshop(), []

    @settings(max_examples=examples)
    @given(WINDOWS)
    def there_from_the_start(windows):
        run = Run(make(shop, kind), POOL, drafts=own_drafts())
        run.run(windows)
        at_once.append(run.at_once)

    there_from_the_start()
    return sum(at_once)


def check_late(kind, examples):
    @settings(max_examples=examples)
    @given(WINDOWS, st.integers(0, 40))
    def compiled_at_any_time(windows, held_for):
        shop = Workshop(threads=1, held=True)
        try:
            source, triggers, options = KINDS[kind]
            session = shop.session(source, *triggers, **options)

            def release():
                shop.engine.release()
                session._compile.join_rows()

            Run(make(shop, kind), POOL, release, held_for, drafts=own_drafts()).run(windows)
        finally:
            shop.close()

    compiled_at_any_time()


def settled(kind, tokens):
    """A session whose grammar compiled only once these tokens were accepted; None where they end the request then."""
    shop = Workshop(threads=1, held=True)
    try:
        session = make(shop, kind)()
        kept = [token for token in tokens if session.accept(token)]
        shop.engine.release()
        session._compile.join_rows()
        session.stop_legal()
    except LazyGrammarError:
        return None
    finally:
        shop.close()
    return session, kept


def check_taken_back(kind, examples):
    @settings(max_examples=examples)
    @given(st.lists(st.sampled_from(POOL), max_size=8), st.integers(0, 8))
    def taken_back(tokens, n):
        if (there := settled(kind, tokens)) is None:
            return
        session, kept = there
        n = min(n, len(kept))
        session.rollback(n)
        fresh, _ = settled(kind, kept[: len(kept) - n])
        assert row(session) == row(fresh)
        assert told(session) == told(fresh)

    taken_back()


def check_budget(kind, examples):
    shop = Workshop(engine=XgrammarEngine(VOCABULARY, max_threads=1))
    source, triggers, options = KINDS[kind]

    @settings(max_examples=examples)
    @given(WINDOWS, st.integers(1, 16))
    def within_a_budget(windows, budget):
        Run(lambda: shop.session(source, *triggers, budget=True, **options), POOL, budget=budget).run(windows)

    within_a_budget()


LAZY = [kind for kind in KINDS if KINDS[kind][1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_leaves_no_trace(kind):
    check(kind, 4)


@pytest.mark.parametrize("kind", LAZY)
def test_a_window_leaves_no_trace_whenever_the_compile_is_done(kind):
    check_late(kind, 3)


@pytest.mark.parametrize("kind", LAZY)
def test_what_was_kept_while_the_grammar_compiled_can_be_taken_back(kind):
    check_taken_back(kind, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_leaves_no_trace_near_the_end_of_a_budget(kind):
    check_budget(kind, 3)


@pytest.mark.parametrize("kind", ["eager", "eager, marked", "a long call"])
def test_windows_inside_a_grammar_are_filled_at_once(kind):
    assert check(kind, 12) >= 3


def inside(shop, kind):
    """A session that stands in a grammar, and drafts that it takes there."""
    session = make(shop, kind)()
    assert session.accept(ids("<t>")[0]) or row(session)
    return session


def filled(session, drafts, remaining=None):
    rows = np.zeros((len(drafts) + 1, VOCABULARY.row_words), np.int32)
    return session.fill_window(rows, drafts, remaining), [allowed_ids(r) for r in rows]


def test_a_window_is_left_to_its_caller_where_a_token_does_more_than_step_the_matcher():
    shop = Workshop()
    eager, lazy, twice = (inside(shop, kind) for kind in ("eager, short", "word", "rearm"))
    assert filled(eager, ids("a", "b", "1"))[0]
    assert not filled(eager, ids("a", "b", "1", "<end>"))[0]
    assert not filled(eager, ids("a", "a"))[0]
    assert not filled(eager, [-1])[0]
    assert not filled(eager, [VOCABULARY.size])[0]
    assert not filled(make(shop, "word")(), ids("a"))[0]
    assert filled(lazy, [])[0]
    assert not filled(lazy, ids("1"))[0]  # complete, which is counted
    assert not filled(twice, ids("1", "a"))[0]
    assert (eager.num_offered, lazy.num_offered, twice.num_offered) == (0, 1, 1)


def test_a_matcher_that_does_not_look_ahead_is_walked_and_taken_back(monkeypatch):
    shop = Workshop()
    session, other = inside(shop, "eager"), inside(shop, "eager")
    drafts = ids("{", '"', "ab", '"', ":")
    there = filled(session, drafts)
    for name in ("taken", "fill_ahead"):
        monkeypatch.delattr(FakeMatcher, name)
    assert filled(other, drafts) == there
    assert there[0]
    assert other.validate([*drafts, *ids("a")]) == drafts
    assert other._walk.at.matcher.steps == 0


def test_the_rows_of_a_window_lead_out_where_the_budget_ends_inside_it():
    shop = Workshop(engine=XgrammarEngine(VOCABULARY, max_threads=1))
    sessions = [shop.session(KINDS["eager"][0], budget=True) for _ in range(2)]
    drafts = ids("{", '"', "a", '"')
    assert all(row(session) for session in sessions)
    done, rows = filled(sessions[0], drafts, 8)
    assert done
    for i, found in enumerate(rows):
        out = np.zeros(VOCABULARY.row_words, np.int32)
        sessions[1].fill(out, 8 - i)
        assert found == allowed_ids(out)
        assert i == len(drafts) or sessions[1].accept(drafts[i])
    assert rows != filled(sessions[0], drafts)[1]


@pytest.mark.long
@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("every", [check, check_late, check_taken_back, check_budget])
def test_thousands_of_windows_leave_no_trace(kind, every):
    every(kind, 100)
