"""Each grammar is compiled once, kept within bounds, and warmed at its first positions."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.rows import RowCache
from vllm_lazy_grammar.errors import GrammarError
from vllm_lazy_grammar.testing import FakeEngine, small_vocabulary

AB = GrammarKey("regex", "abc|abb")


class Bench:
    """A store over a fake engine, and its parts."""

    def __init__(self, *, limit=1 << 20, top_k=8, threads=1, held=False, on_warm=None):
        self.engine = FakeEngine(small_vocabulary(), held=held)
        self.worker, self.rows = Worker(threads), RowCache(1 << 20)
        words = self.engine.vocabulary.row_words
        self.store = GrammarStore(
            self.engine, self.worker, self.rows, words, limit_bytes=limit, top_k=top_k, on_warm=on_warm
        )


@pytest.fixture
def bench():
    made = []

    def make(**options):
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.engine.release()
        each.worker.close()


def test_eight_requests_with_one_key_compile_once(bench):
    b = bench(held=True)
    compiles = [b.store.get(AB) for _ in range(8)]
    b.engine.release()
    assert len({id(c.result()) for c in compiles}) == 1
    assert b.engine.compiled == [AB]


def test_an_aborted_compile_that_has_not_started_never_starts(bench):
    b = bench()
    with b.worker.held():
        first, second = b.store.get(AB), b.store.get(GrammarKey("regex", "c"))
        first.release()
    second.result()
    assert b.engine.compiled == [second.key]
    assert len(b.store) == 1


def test_one_of_two_requests_that_leaves_does_not_cancel_the_compile_of_the_other(bench):
    b = bench()
    with b.worker.held():
        first, second = b.store.get(AB), b.store.get(AB)
        first.release()
    assert second.result().key == AB


def test_a_compile_that_failed_is_forgotten_and_its_error_reaches_each_that_asked(bench):
    b = bench()
    bad = GrammarKey("regex", "(")
    for _ in range(2):
        compile_ = b.store.get(bad)
        with pytest.raises(GrammarError, match=r"structured_outputs\.regex"):
            compile_.result()
        compile_.release()
    assert b.engine.compiled == [bad, bad]
    assert len(b.store) == 0


def test_grammars_that_nobody_holds_are_kept_up_to_the_limit_and_the_oldest_goes_first(bench):
    b = bench(limit=2, threads=0)
    for source in "abc":
        b.store.get(GrammarKey("regex", source)).release()
    assert len(b.store) == 2
    b.store.get(GrammarKey("regex", "c")).release()
    assert [k.source for k in b.engine.compiled] == ["a", "b", "c"]
    b.store.get(GrammarKey("regex", "a")).release()
    assert [k.source for k in b.engine.compiled] == ["a", "b", "c", "a"]


def test_a_held_grammar_is_never_dropped(bench):
    b = bench(limit=1, threads=0)
    held = b.store.get(GrammarKey("regex", "aaaa"))
    b.store.get(GrammarKey("regex", "bbbb")).release()
    assert b.store.get(held.key) is held


def test_rows_are_warmed_at_the_start_and_behind_each_certain_byte(bench):
    b = bench()
    compile_ = b.store.get(AB)
    assert compile_.join_rows() == compile_.warmed == compile_.asked == 3
    assert compile_.path == b"ab"
    for prefix in (b"", b"a", b"ab"):
        cached, fresh = (np.zeros(b.engine.vocabulary.row_words, np.int32) for _ in range(2))
        matcher = compile_.result().matcher()
        matcher.accept_bytes(prefix)
        matcher.fill(fresh)
        assert b.rows.get((AB, prefix), cached)
        np.testing.assert_array_equal(cached, fresh)


def test_at_most_top_k_rows_are_warmed(bench):
    assert bench(top_k=2).store.get(AB).join_rows() == 2


def test_prewarm_finished_tells_without_joining(bench):
    b = bench(held=True)
    compile_ = b.store.get(AB)
    b.engine.waiting.wait()
    assert not compile_.prewarm_finished
    b.engine.release()
    compile_.join_rows()
    assert compile_.prewarm_finished


def test_the_hook_is_called_once_everything_is_warm(bench):
    warm, seen = threading.Event(), []

    def on_warm(compile_):
        seen.append((compile_.key, compile_.warmed))
        warm.set()

    bench(on_warm=on_warm).store.get(AB)
    assert warm.wait(30)
    assert seen == [(AB, 3)]


def test_with_prewarm_off_nothing_is_warmed(bench):
    b = bench(top_k=0)
    assert b.store.get(AB).join_rows() == 0
    assert len(b.rows) == 0
