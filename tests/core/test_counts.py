"""What is counted of a request, and how a tally takes it in."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from tests.core.kit import Workshop, feed, row
from vllm_lazy_grammar.core import counts
from vllm_lazy_grammar.core.compiles import GrammarStore
from vllm_lazy_grammar.core.counts import METRICS, SUM, Change, Metric, Series, Tally, of_request
from vllm_lazy_grammar.core.matcher import GrammarKey
from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.core.rows import RowCache, ones
from vllm_lazy_grammar.core.trace import Trace
from vllm_lazy_grammar.engines.xgrammar import XgrammarEngine
from vllm_lazy_grammar.errors import GrammarError
from vllm_lazy_grammar.testing import FakeEngine, small_vocabulary


@pytest.fixture
def workshop():
    made = Workshop()
    yield made
    made.close()


def told(session, kind=counts.LAZY, origin="xgrammar, since it can"):
    """What a session's trace adds, but the seconds, as {name: amount} or {name/label: amount}."""
    changes = of_request(kind, origin, session.trace)
    names = [change.metric.name.removeprefix(counts.PREFIX).removesuffix("_total") for change in changes]
    found = {"/".join(filter(None, (name, c.value))): c.amount for name, c in zip(names, changes, strict=True)}
    return {name: amount for name, amount in found.items() if "seconds" not in name}


# -- the names --------------------------------------------------------------------------------------------------------


def test_names_are_those_that_prometheus_asks_for():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("lazy_grammar_")
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert metric.name.endswith(("_seconds", "_seconds_total")) == (metric.unit == "seconds")
        assert metric.help.endswith(".")


def test_labels_are_bounded_and_histograms_have_buckets_that_grow_without_end():
    for metric in METRICS:
        assert bool(metric.label) == (metric.values != ("",))
        assert len(set(metric.values)) == len(metric.values) < 10
        assert bool(metric.buckets) == (metric.type == "histogram")
        assert all(one < next_one for one, next_one in pairwise(metric.buckets))
        assert not metric.buckets or metric.buckets[-1] == float("inf")


def test_there_are_few_series():
    assert len(Tally().values) < 300


# -- one request ------------------------------------------------------------------------------------------------------


def test_a_request_whose_trigger_fired_and_that_was_armed_again(workshop):
    session = workshop.session("ab", "word:a", rearm=True)
    for _ in range(2):
        row(session)
        assert feed(session, "a", "b", "c")
    assert told(session) == {
        "requests/lazy": 1, "compiler_requests/xgrammar": 1, "armed": 3, "fired/word": 2, "mask_rows": 2,
        "refused_tail_rows": 2,  # `abc` would fire, and the grammar takes no c
    }  # fmt: skip


def test_a_request_that_never_fired(workshop):
    session = workshop.session("ab", "pattern:b(a)", "word:xyz")
    assert feed(session, "c", "c")
    assert told(session, "tools_auto") == {
        "requests/tools_auto": 1, "compiler_requests/xgrammar": 1, "armed": 1, "never_fired/tools_auto": 1
    }  # fmt: skip


def test_a_trigger_whose_text_the_grammar_refuses_is_disarmed_and_counts_as_not_fired(workshop):
    session = workshop.session("bc", "word:a", on_reject="disarm")
    assert feed(session, "a")
    found = told(session)
    assert (found["disarmed"], found["never_fired/lazy"]) == (1, 1)


def test_rows_without_refused_tails_and_with_only_the_way_into_a_trigger_are_told(workshop):
    masking = workshop.session("bc1", "word:ab")
    for text in ("{", "a"):
        assert feed(masking, text)
        assert row(masking)[0]
    assert told(masking)["refused_tail_rows"] == 2
    forced = workshop.session("ab", "word:ab", mandatory=True, force_after=0)
    assert row(forced)[0]
    assert told(forced)["forced_requests"] == 1


def test_a_request_that_is_led_out_one_whose_budget_is_too_small_and_one_whose_ends_are_not_known(workshop):
    braces = Workshop(engine=XgrammarEngine(workshop.vocabulary, max_threads=1))
    led, short = (braces.session('root ::= "{" root "}" | "a"', kind="grammar", budget=True) for _ in range(2))
    unknown = workshop.session("(ab)*c", budget=True)
    for session, remaining in ((led, 3), (short, 1), (unknown, 3)):
        session.fill(ones(workshop.vocabulary.row_words), remaining)
    braces.close()
    assert told(led, counts.EAGER)["led_out_requests"] == 1
    assert told(short, counts.EAGER)["budget_missed/too_short"] == 1
    assert told(unknown, counts.EAGER)["budget_missed/unknown"] == 1


def test_seconds_and_drafts_come_from_the_trace():
    trace = Trace(eager=True, fill_seconds=0.5, joined_seconds=0.25, endings_seconds=0.125)
    trace.drafts_offered, trace.drafts_accepted, trace.budget_lost = 8, 5, True
    changes = {(change.metric, change.value): change.amount for change in of_request(counts.EAGER, "", trace)}
    assert changes == {
        (counts.REQUESTS, "eager"): 1,
        (counts.COMPILED_BY, "none"): 1,
        (counts.BUDGET_MISSED, "unknown"): 1,
        (counts.MASK_SECONDS, ""): 0.5,
        (counts.DRAFTED, ""): 8,
        (counts.ACCEPTED, ""): 5,
        (counts.WAIT_SECONDS, "step"): 0.25,
        (counts.WAIT_SECONDS, "endings"): 0.125,
    }


@pytest.mark.parametrize(
    ("origin", "compiler"),
    [
        ("", "none"),
        ("xgrammar", "xgrammar"),
        ("xgrammar, tool by tool", "xgrammar"),
        ("llguidance, since xgrammar: no", "llguidance"),
        ("glrmask", "glrmask"),
        ("fake", "other"),
    ],
)
def test_the_compiler_is_told_by_the_grammars_origin(origin, compiler):
    assert counts.compiler_of(origin) == compiler


# -- caches and compiles ----------------------------------------------------------------------------------------------


def test_the_row_cache_counts_what_was_there_and_what_was_not():
    cache, out = RowCache(1 << 20), ones(2)
    assert not cache.get("a", out)
    cache.put("a", out)
    assert cache.get("a", out)
    assert counts.of_cache("rows", cache) == [
        Change(counts.CACHE_BYTES, cache.nbytes, "rows"),
        Change(counts.CACHE_HITS, 1, "rows", is_whole=True),
        Change(counts.CACHE_MISSES, 1, "rows", is_whole=True),
    ]


def test_the_store_tells_each_compile_once_and_counts_what_it_keeps():
    engine, done = FakeEngine(small_vocabulary()), []
    worker = Worker(0)
    store = GrammarStore(
        engine, worker, RowCache(1 << 20), engine.vocabulary.row_words, limit_bytes=1 << 20, top_k=0,
        on_compile=lambda compile_: done.append((compile_.key.source, compile_.future.exception(), compile_.seconds)),
    )  # fmt: skip
    held = [store.get(GrammarKey("regex", source)) for source in ("ab", "ab", "(")]
    (good, none, spent), (bad, error, _) = done
    assert (good, none, bad) == ("ab", None, "(")
    assert isinstance(error, GrammarError)
    assert spent >= 0
    assert (store.hits, store.misses, store.nbytes) == (1, 2, 0)
    for compile_ in held:
        compile_.release()
    assert store.nbytes == held[0].result().nbytes > 0


def test_the_endings_of_a_grammar_are_begun_once(workshop):
    for _ in range(3):
        workshop.session("(ab)*c", budget=True).fill(ones(workshop.vocabulary.row_words), 3)
    assert (workshop.endings.misses, workshop.endings.hits) == (1, 2)


# -- the tally --------------------------------------------------------------------------------------------------------


def test_a_counter_grows_a_gauge_stands_and_a_whole_count_replaces_a_smaller_one():
    changed = []
    tally = Tally(lambda series, value: changed.append((series.metric.name, series.value, value)))
    tally.add([Change(counts.ARMED, 2), Change(counts.CACHE_BYTES, 7, "rows"), Change(counts.CACHE_HITS, 3, "rows", is_whole=True)])  # fmt: skip
    tally.add([Change(counts.ARMED, 1), Change(counts.CACHE_BYTES, 5, "rows"), Change(counts.CACHE_HITS, 2, "rows", is_whole=True)])  # fmt: skip
    assert changed == [
        ("lazy_grammar_armed_total", "", 2),
        ("lazy_grammar_cache_bytes", "rows", 7),
        ("lazy_grammar_cache_hits_total", "rows", 3),
        ("lazy_grammar_armed_total", "", 3),
        ("lazy_grammar_cache_bytes", "rows", 5),
    ]


def test_an_observation_falls_into_the_first_bucket_that_holds_it():
    tally = Tally()
    tally.add([Change(counts.COMPILE_SECONDS, seconds, "xgrammar") for seconds in (0.0, 0.0005, 0.0007, 99.0)])
    found = {series.part: value for series, value in tally.values.items() if series[:2] == (counts.COMPILE_SECONDS, "xgrammar") and value}  # fmt: skip
    assert found == {0.0005: 2, 0.001: 1, float("inf"): 1, SUM: pytest.approx(99.0012)}


def test_a_label_that_is_not_named_is_not_taken():
    with pytest.raises(KeyError):
        Tally().add([Change(counts.REQUESTS, 1, "what a client says")])


def test_what_is_added_while_something_is_taken_in_is_not_lost():
    tally = Tally(lambda series, _: series.metric is counts.ARMED and tally.add([Change(counts.DISARMED, 1)]))
    tally.add([Change(counts.ARMED, 1), Change(counts.FORCED, 1)])
    assert [tally.values[Series(m, "", None)] for m in (counts.ARMED, counts.FORCED, counts.DISARMED)] == [1, 1, 1]


def test_many_threads_add_at_once():
    tally, each = Tally(), 500

    def add():
        for _ in range(each):
            tally.add([Change(counts.ARMED, 1), Change(counts.WAIT_SECONDS, 1, "step")])

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.values[Series(counts.ARMED, "", None)] == 8 * each
    assert tally.values[Series(counts.WAIT_SECONDS, "step", SUM)] == 8 * each


def test_every_series_of_a_histogram_is_there_from_the_start():
    metric = Metric("x_seconds", "histogram", "seconds", "X.", "of", ("a", "b"), (1.0, float("inf")))
    assert [(s.value, s.part) for s in metric.series()] == [
        ("a", SUM), ("a", 1.0), ("a", float("inf")), ("b", SUM), ("b", 1.0), ("b", float("inf"))
    ]  # fmt: skip
