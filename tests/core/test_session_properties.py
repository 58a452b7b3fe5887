"""Whatever is offered, refused, validated, filled and taken back: the session is the one that saw only what was kept."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.kit import VOCABULARY, Workshop, ids, row, state
from vllm_lazy_grammar.testing import SMALL_CALL, SMALL_END, SMALL_SIZE

KINDS = {
    "eager": (r'\{"[abc]*":[12]+\}', (), {}),
    "word": ("<t>[12]+", ("word:<t>",), {}),
    "two words": ("(?:<t>[12]+|ab[12])", ("word:<t>", "word:ab"), {"on_reject": "disarm"}),
    "rearm": ("<t>[12]+", ("word:<t>",), {"rearm": 1}),
    "rearm twice": ("<t>1", ("word:<t>",), {"rearm": 1, "max_activations": 2, "mandatory": 1}),
    "token": ("<call>a<end>", (f"token:{SMALL_CALL}",), {"rearm": 1}),
    "after": ("[ab]+1", ("pattern:t(>)",), {"start": "after"}),
    "pattern": ("(?:bc|c)1", ("pattern:a(b?c)",), {"on_reject": "disarm", "rearm": 1}),
    "forced": ("<t>[12]", ("word:<t>",), {"mandatory": 1, "force_after": 3}),
}
TOKENS = st.one_of(
    st.sampled_from(ids("<t>", "<", "t", ">", "1", "2", "a", "b", "c", "ab", "abc", "bc", '"', "{", "}", ":", "<end>")),
    st.integers(-1, SMALL_SIZE),
)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), TOKENS),
        st.tuples(st.just("follow"), st.integers(0, 10**6)),
        st.tuples(st.just("rollback"), st.integers(0, 6)),
        st.tuples(st.just("validate"), st.lists(TOKENS, max_size=5)),
        st.tuples(st.just("fill"), st.none()),
    ),
    max_size=25,
)


def fresh(shop, kind, kept):
    source, triggers, options = KINDS[kind]
    session = shop.session(source, *triggers, **options)
    for token in kept:
        assert session.accept(token)
    return session


def perform(session, kept, call, argument):
    """One call on the session; `kept` is changed as the session should be."""
    if call == "follow":
        _, allowed = row(session)
        allowed = [t for t in allowed if t < SMALL_SIZE]
        call, argument = "accept", allowed[argument % len(allowed)] if allowed else SMALL_END
    if call == "accept" and session.accept(argument):
        kept.append(argument)
    elif call == "rollback":
        n = min(argument, len(kept))
        session.rollback(n)
        del kept[len(kept) - n :]
    elif call == "validate":
        found = session.validate(argument)
        assert found == argument[: len(found)]
    elif call == "fill":
        row(session)


@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_random_walks_with_rollback_equal_a_fresh_replay(kind, examples):
    shop = Workshop()

    @settings(derandomize=True, deadline=None, max_examples=examples)
    @given(CALLS)
    def check(calls):
        session, kept = fresh(shop, kind, ()), []
        for call, argument in calls:
            perform(session, kept, call, argument)
        assert state(session) == state(fresh(Workshop(prewarm=0), kind, kept))  # with a cache of its own

    check()


@pytest.mark.parametrize("examples", [5, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "eager"])
def test_a_grammar_that_compiles_late_gives_the_same_session_as_one_that_was_there(kind, examples):
    @settings(derandomize=True, deadline=None, max_examples=examples)
    @given(st.lists(TOKENS, max_size=8))
    def check(tokens):
        late, there = Workshop(threads=1, held=True), Workshop()
        try:
            options = {**KINDS[kind][2], "on_reject": "disarm"}
            source, triggers = KINDS[kind][:2]
            session, other = (w.session(source, *triggers, **options) for w in (late, there))
            kept = [t for t in tokens if other.accept(t)]
            assert [t for t in kept if session.accept(t)] == kept
            late.engine.release()
            assert row(session) == row(other)
            assert (session.phase, session.buffer) == (other.phase, other.buffer)
        finally:
            late.close()

    check()


@pytest.mark.parametrize("examples", [6, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_allowed_token_is_accepted_and_inside_every_masked_one_is_not(kind, examples):
    shop = Workshop()

    @settings(derandomize=True, deadline=None, max_examples=examples)
    @given(st.lists(st.integers(0, 10**6), max_size=8))
    def check(choices):
        session = fresh(shop, kind, ())
        for choice in choices:
            perform(session, [], "follow", choice)
        _, allowed = row(session)
        holds = session.phase.value == "inside" and not session.is_terminated()
        for token in range(VOCABULARY.size):
            accepted = session.fork().validate([token]) == [token]
            if token in allowed:
                assert accepted or session.is_terminated()
            elif holds:
                assert not accepted

    check()


class Stopped(Workshop):
    """Its worker stops behind the first row that it warms, until it is let go."""

    def __init__(self):
        super().__init__(threads=1)
        self.stopped, self.go = threading.Event(), threading.Event()
        self.warmed, self._put = 0, self.rows.put
        self.rows.put = self._one_then_wait

    def _one_then_wait(self, key, row):
        if threading.current_thread().name.startswith("lazy-grammar"):
            self.warmed += 1
            if self.warmed > 1:
                self.stopped.set()
                self.go.wait()
        self._put(key, row)

    def started(self, kind):
        """Wait until the worker has stopped, or has done what there is to do."""
        compile_ = fresh(self, kind, ())._compile
        compile_.result()
        while not (self.stopped.is_set() or compile_.prewarm_finished):
            pass

    def close(self):
        self.go.set()
        super().close()


ONE_ROW = {"two words", "after", "pattern"}
"""Grammars that are certain of no byte at their start: there is no half-way."""


@pytest.mark.parametrize("examples", [4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prewarm", ["off", "on", "stopped half-way"])
def test_prewarm_on_off_and_stopped_half_way_give_the_same_rows(kind, prewarm, examples):
    shop = Stopped() if prewarm == "stopped half-way" else Workshop(prewarm=8 if prewarm == "on" else 0)
    plain = Workshop(prewarm=0)

    @settings(derandomize=True, deadline=None, max_examples=examples)
    @given(st.lists(st.integers(0, 10**6), max_size=8))
    def check(choices):
        session, other = fresh(shop, kind, ()), fresh(plain, kind, ())
        for choice in choices:
            perform(session, kept := [], "follow", choice)
            assert [t for t in kept if other.accept(t)] == kept
            assert row(session) == row(other)

    try:
        if prewarm == "stopped half-way":
            shop.started(kind)
        check()
        if prewarm == "stopped half-way":
            assert (shop.stopped.is_set(), shop.warmed) == ((False, 1) if kind in ONE_ROW else (True, 2))
    finally:
        shop.close()
