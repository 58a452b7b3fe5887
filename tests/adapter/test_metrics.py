"""What an engine counts, the files that it writes, and what a registry of Prometheus' client makes of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.adapter.test_manager import LAZILY, SCHEMA, Engine
from tests.quiet import import_quietly, import_vllm
from vllm_lazy_grammar.core import counts
from vllm_lazy_grammar.core.counts import METRICS, Change

pytestmark = pytest.mark.vllm

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The module, in a process that has no folder yet; the system's temporary folder is one of the test's own."""
    import_vllm()
    found = import_quietly("vllm_lazy_grammar.adapter.metrics")
    for name in (found.OURS, found.THEIRS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(found.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(found, "_made", {})
    monkeypatch.setattr(found, "_served", set())
    return found


def read(module, folder):
    """All samples in a folder, as Prometheus' own collector reads them: {(name, labels besides model and engine): value}."""
    from prometheus_client.multiprocess import MultiProcessCollector

    found = {}
    for metric in MultiProcessCollector(None, str(folder)).collect():
        for sample in metric.samples:
            labels = {**sample.labels}
            assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
            found[sample.name, *sorted(labels.values())] = sample.value
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


# -- files ------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_prometheus_own_metrics_write(module, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    files = module.Files(ours, LABELS, stays=True)
    tally = counts.Tally(files.write)
    for series in tally.values:
        files.write(series, 0)
    observed = (0.0004, 0.3, 99.0)
    tally.add([Change(counts.REQUESTS, 3, "lazy"), Change(counts.CACHE_BYTES, 7, "rows")])
    tally.add([Change(counts.COMPILE_SECONDS, seconds, "xgrammar") for seconds in observed])
    source = f"""
import prometheus_client as p
by = {list(LABELS)}, {list(LABELS.values())}
p.Counter({counts.REQUESTS.name!r}, "", by[0] + ["kind"]).labels(*by[1], "lazy").inc(3)
p.Gauge({counts.CACHE_BYTES.name!r}, "", by[0] + ["cache"], multiprocess_mode="mostrecent").labels(*by[1], "rows").set(7)
buckets = {[str(b) for b in counts.COMPILE_SECONDS.buckets]}
made = p.Histogram({counts.COMPILE_SECONDS.name!r}, "", by[0] + ["compiler"], buckets=[float(b) for b in buckets])
for seconds in {observed}:
    made.labels(*by[1], "xgrammar").observe(seconds)
"""
    subprocess.run([sys.executable, "-c", source], check=True, env={**os.environ, module.THEIRS: str(theirs)})
    mine, known = read(module, ours), read(module, theirs)
    assert known == {key: value for key, value in mine.items() if key in known}
    assert [key for key, value in mine.items() if value and key not in known] == []


def test_every_metric_is_there_from_the_start(module, tmp_path, monkeypatch):
    monkeypatch.setenv(module.THEIRS, str(tmp_path))
    assert module.tally(config()) is not None
    names = {name for name, *_ in read(module, tmp_path)}
    assert [m.name for m in METRICS if {m.name, f"{m.name}_sum"}.isdisjoint(names)] == []


def test_two_engines_of_one_process_write_beside_each_other(module, tmp_path, monkeypatch):
    monkeypatch.setenv(module.THEIRS, str(tmp_path))
    one, two = module.tally(config()), module.tally(config())
    for tally in (one, two):
        tally.add([Change(counts.ARMED, 1)])
    assert read(module, tmp_path)["lazy_grammar_armed_total",] == 2


def test_files_of_a_dead_process_go_with_the_next_engine_and_those_of_a_living_one_stay(module, tmp_path):
    living = module.Files(tmp_path, LABELS, stays=True)
    source = (
        "import os, sys; from tests.quiet import import_vllm; import_vllm(); from pathlib import Path\n"
        "from vllm_lazy_grammar.adapter.metrics import Files\n"
        f"files = Files(Path({str(tmp_path)!r}), {LABELS!r}, stays=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", source], check=False, cwd=Path(__file__).parents[2])
    assert killed.returncode == -9
    assert len(list(tmp_path.glob("*.db"))) == 6
    next_one = module.Files(tmp_path, LABELS, stays=True)
    assert sorted({path.stem.split("_")[-1] for path in tmp_path.glob("*.db")}) == sorted(
        [living._name, next_one._name]
    )
    assert len(list(tmp_path.glob("*.lock"))) == 2


def test_files_in_a_folder_of_ours_go_with_their_engine_and_those_in_vllms_stay_until_the_next(module, tmp_path):
    module.Files(tmp_path, LABELS, stays=False)
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    module.Files(tmp_path, LABELS, stays=True)
    gc.collect()
    assert len(list(tmp_path.glob("*.db"))) == 3


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_is_made_once_and_where_vllm_has_one_none(module, monkeypatch, tmp_path):
    module.prepare()
    made = os.environ[module.OURS]
    module.prepare()
    assert os.environ[module.OURS] == made
    assert [str(path) for path in tmp_path.iterdir()] == [made]
    monkeypatch.delenv(module.OURS)
    monkeypatch.setenv(module.THEIRS, str(tmp_path))
    module.prepare()
    assert module.OURS not in os.environ


def test_the_folder_of_a_process_that_has_started_this_one_is_used_only_where_it_was_started_by_multiprocessing(
    module, monkeypatch, tmp_path
):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv(module.OURS, str(other))
    assert module._own_folder() is None
    monkeypatch.setattr(module.multiprocessing, "parent_process", object)
    assert module._own_folder() == other
    other.rmdir()
    assert module._own_folder() is None


def test_a_folder_that_a_killed_process_left_goes_with_the_next_start_and_a_living_ones_stays(module, tmp_path):
    module.prepare()
    living = Path(os.environ[module.OURS])
    left, foreign = tmp_path / "lazy-grammar-metrics-left", tmp_path / "lazy-grammar-metrics-foreign"
    for folder in (left, foreign):
        folder.mkdir()
    (left / "owner.lock").touch()
    (left / "counter_lazygrammar-1-0.db").touch()
    module._remove_left_behind(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, foreign])


def test_the_folder_goes_with_its_process(module, tmp_path):
    source = (
        "from tests.quiet import import_vllm; import_vllm()\n"
        "import os; from vllm_lazy_grammar.adapter import metrics as m\n"
        "m.prepare(); print(os.environ[m.OURS], os.path.isdir(os.environ[m.OURS]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    folder, existed = run.stdout.split()[-2:]
    assert existed == "True"
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()


# -- who reads --------------------------------------------------------------------------------------------------------


def test_the_default_registry_shows_what_engines_count_beside_vllms(module):
    from prometheus_client import REGISTRY, generate_latest

    module.prepare()
    module.serve()
    module.serve()
    try:
        assert len(registered(module)) == 1
        module.tally(config()).add([Change(counts.FIRED, 2, "word")])
        page = generate_latest(REGISTRY).decode()
        assert 'lazy_grammar_fired_total{engine="0",model_name="m",trigger="word"} 2.0' in page
        assert "# TYPE lazy_grammar_fired_total counter" in page
        assert "process_cpu_seconds_total" in page
    finally:
        taken_out(module)


def test_where_vllm_has_a_folder_the_registry_is_left_alone(module, monkeypatch, tmp_path):
    monkeypatch.setenv(module.THEIRS, str(tmp_path))
    module.serve()
    assert registered(module) == []


def test_a_folder_that_can_not_be_read_costs_the_page_nothing_else_and_is_told_once(module, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(module.logger, "error", lambda *args: told.append(args))
    collector = module.Collector(tmp_path)
    (tmp_path / "counter_lazygrammar-1-0.db").write_bytes(b"\xff" * 64)
    assert [collector.collect(), collector.collect()] == [[], []]
    assert len(told) == 1
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
        each
        for each in module.Collector(Path(os.environ[module.OURS])).collect()
        if each.name == "lazy_grammar_requests"
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
    assert module.OURS not in os.environ
