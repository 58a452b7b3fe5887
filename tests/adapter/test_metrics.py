"""What an engine counts, the files that it writes, and what a registry of Prometheus' client makes of them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.adapter.test_manager import LAZILY, SCHEMA, Engine
from tests.adapter.test_metric_files import read
from tests.quiet import import_quietly, import_vllm
from vllm_lazy_grammar.adapter import metric_files
from vllm_lazy_grammar.adapter.metric_files import OURS, THEIRS
from vllm_lazy_grammar.core import counts
from vllm_lazy_grammar.core.counts import METRICS, Change
from vllm_lazy_grammar.core.prewarm import ROWS

pytestmark = pytest.mark.vllm

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The module, in a process that has no folder yet; the system's temporary folder is one of the test's own."""
    import_vllm()
    found = import_quietly("vllm_lazy_grammar.adapter.metrics")
    for name in (OURS, THEIRS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric_files.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(metric_files, "_made", {})
    monkeypatch.setattr(found, "_served", set())
    taken_out(found)  # what an engine of another test has registered
    return found


def registered(module):
    """What was registered in the default registry of this test, taken out again by the caller."""
    from prometheus_client import REGISTRY

    return [each for each in REGISTRY._collector_to_names if isinstance(each, module.Collector)]


def taken_out(module):
    from prometheus_client import REGISTRY

    for each in registered(module):
        REGISTRY.unregister(each)


def config(name="m", engine=0):
    model, parallel = SimpleNamespace(served_model_name=name), SimpleNamespace(data_parallel_index=engine)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


# -- who writes --------------------------------------------------------------------------------------------------------


def test_every_metric_is_there_from_the_start(module, tmp_path, monkeypatch):
    monkeypatch.setenv(THEIRS, str(tmp_path))
    assert module.tally(config()) is not None
    names = {name for name, *_ in read(tmp_path)}
    assert [m.name for m in METRICS if {m.name, f"{m.name}_sum"}.isdisjoint(names)] == []


def test_two_engines_of_one_process_write_beside_each_other(module, tmp_path, monkeypatch):
    monkeypatch.setenv(THEIRS, str(tmp_path))
    one, two = module.tally(config()), module.tally(config())
    for tally in (one, two):
        tally.add([Change(counts.ARMED, 1)])
    assert read(tmp_path)["lazy_grammar_armed_total",] == 2


# -- who reads --------------------------------------------------------------------------------------------------------


def test_the_default_registry_shows_what_engines_count_beside_vllms(module):
    from prometheus_client import REGISTRY, generate_latest

    module.prepare()
    module.serve()
    module.serve()
    try:
        assert len(registered(module)) == 1
        tally = module.tally(config())
        tally.add([Change(counts.FIRED, 2, "word")])
        page = generate_latest(REGISTRY).decode()
        assert 'lazy_grammar_fired_total{engine="0",model_name="m",trigger="word"} 2.0' in page
        assert "# TYPE lazy_grammar_fired_total counter" in page
        assert "process_cpu_seconds_total" in page
    finally:
        taken_out(module)


def test_where_vllm_has_a_folder_the_registry_is_left_alone(module, monkeypatch, tmp_path):
    monkeypatch.setenv(THEIRS, str(tmp_path))
    module.serve()
    assert registered(module) == []


def test_a_folder_that_can_not_be_read_costs_the_page_nothing_else_and_is_told_once(module, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(module.logger, "error", lambda *args: told.append(args))
    collector = module.Collector(tmp_path)
    broken = bytes([64, *bytes(7), 99, *bytes(55)])  # 64 bytes are used, and the first entry has 99
    (tmp_path / "counter_lazygrammar-1-0.db").write_bytes(broken)
    assert [collector.collect(), collector.collect()] == [[], []]
    assert len(told) == 1
    (tmp_path / "counter_lazygrammar-1-0.db").write_bytes(b"")
    assert collector.collect() == []
    (tmp_path / "counter_lazygrammar-1-0.db").unlink()
    assert [metric.name for metric in collector.describe()][:1] == ["lazy_grammar_requests"]


# -- an engine --------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(module, request):
    made = Engine(additional_config={"lazy_grammar": {"threads": 1, **getattr(request, "param", {})}})
    yield made
    made.manager.clear_backend()
    taken_out(module)


def values(engine):
    """What is counted and not zero, but seconds."""
    found = engine.manager.backend.counts._tally.values
    short = {
        f"{s.metric.name}/{s.value}".removeprefix("lazy_grammar_"): v for s, v in found.items() if v and s.part is None
    }
    return {name: value for name, value in short.items() if "seconds" not in name}


def test_an_engine_counts_each_request_once_when_it_is_over(engine, module):
    fired, dropped, eager = (
        engine.request(LAZILY, json=SCHEMA),
        engine.request(LAZILY, json=SCHEMA),
        engine.request(json=SCHEMA),
    )
    engine.ready(eager)
    assert "requests_total/lazy" not in values(engine)
    for token in engine.ids('so <x>{"a": 1}'):
        engine.rows(fired)
        fired.append_output_token_ids([token])
        assert engine.manager.accept_tokens(fired, [token])
    engine.ready(fired).finish()
    engine.ready(fired).finish()
    dropped.structured_output_request.grammar = None
    engine.manager.backend.worker.submit(int, ROWS).result()  # rows are warm: the worker holds no grammar
    engine.ready(eager).finish()
    gc.collect()
    found = values(engine)
    told = ("requests_total/lazy", "requests_total/eager", "compiler_requests_total/xgrammar", "armed_total/", "fired_total/word", "never_fired_total/lazy")  # fmt: skip
    assert {name: found.get(name) for name in told} == dict(zip(told, (2, 1, 3, 2, 1, 1), strict=True))
    assert found["mask_rows_total/"] >= len(engine.ids('so <x>{"a": 1}'))
    assert found["cache_hits_total/grammars"] == 2
    assert found["cache_misses_total/grammars"] == 1
    assert found["cache_bytes/grammars"] > 0
    (page,) = [
        each for each in module.Collector(Path(os.environ[OURS])).collect() if each.name == "lazy_grammar_requests"
    ]
    assert [s.value for s in page.samples if s.labels["kind"] == "lazy"] == [2]


def test_a_compile_is_counted_by_compiler_with_its_seconds_and_who_waited(engine):
    series = engine.manager.backend.counts._tally.values
    engine.ready(engine.request(json={**SCHEMA, "title": "counted"}))
    seconds = {(s.metric.name, s.value): v for s, v in series.items() if s.part == "sum"}
    assert seconds["lazy_grammar_compile_seconds", "xgrammar"] > 0
    assert seconds["lazy_grammar_wait_seconds", "queue"] > 0


def test_a_request_whose_grammar_can_not_be_compiled_is_counted_and_the_client_is_to_blame(engine):
    request = engine.request(json={"type": "nothing"})
    engine.ready(request)
    request.append_output_token_ids([5])
    assert not engine.manager.accept_tokens(request, [5])
    found = values(engine)
    assert (found["requests_total/eager"], found["compiler_requests_total/none"]) == (1, 1)
    assert found["ended_requests_total/client"] == 1


def test_the_kind_that_the_front_end_wrote_down_is_counted(engine):
    engine.ready(engine.request({**LAZILY, "grammar_counted_as": "tools_auto"}, json=SCHEMA)).finish()
    assert values(engine)["requests_total/tools_auto"] == 1


def test_a_fault_of_the_counting_ends_it_with_one_line_and_no_request(engine, module, monkeypatch):
    told = []
    monkeypatch.setattr(module.logger, "error", lambda *args: told.append(args))
    monkeypatch.setattr(module.counts, "of_request", lambda *_: 1 / 0)
    for _ in range(2):
        request = engine.request(LAZILY, json=SCHEMA)
        assert engine.accept(request, "so")
        engine.ready(request).finish()
    assert len(told) == 1


@pytest.mark.parametrize("engine", [{"metrics": False}], indirect=True)
def test_with_the_setting_off_there_is_no_folder_and_nothing_is_counted(engine, module):
    request = engine.request(LAZILY, json=SCHEMA)
    engine.ready(request).finish()
    assert engine.manager.backend.counts._tally is None
    assert OURS not in os.environ
