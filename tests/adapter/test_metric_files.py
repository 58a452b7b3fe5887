"""The folder and the files through which an engine's counts cross: in Prometheus' format, and gone with their process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_lazy_grammar.adapter import metric_files
from vllm_lazy_grammar.core import counts
from vllm_lazy_grammar.core.counts import Change

LABELS = {"model_name": "m", "engine": "0"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The module, in a process that has no folder yet; the system's temporary folder is one of the test's own."""
    for name in (metric_files.OURS, metric_files.THEIRS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metric_files.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(metric_files, "_made", {})
    return metric_files


def read(folder):
    """All samples in a folder, as Prometheus' own collector reads them: {(name, labels besides model and engine): value}."""
    from prometheus_client.multiprocess import MultiProcessCollector

    found = {}
    for metric in MultiProcessCollector(None, str(folder)).collect():
        for sample in metric.samples:
            labels = {**sample.labels}
            assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
            found[sample.name, *sorted(labels.values())] = sample.value
    return found


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
    mine, known = read(ours), read(theirs)
    assert known == {key: value for key, value in mine.items() if key in known}
    assert [key for key, value in mine.items() if value and key not in known] == []


def test_files_of_a_dead_process_go_with_the_next_engine_and_those_of_a_living_one_stay(module, tmp_path):
    living = module.Files(tmp_path, LABELS, stays=True)
    source = (
        "import os; from pathlib import Path\n"
        "from vllm_lazy_grammar.adapter.metric_files import Files\n"
        f"files = Files(Path({str(tmp_path)!r}), {LABELS!r}, stays=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", source], check=False, cwd=ROOT)
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
    module.have_folder()
    made = os.environ[module.OURS]
    module.have_folder()
    assert os.environ[module.OURS] == made
    assert [str(path) for path in tmp_path.iterdir()] == [made]
    monkeypatch.delenv(module.OURS)
    monkeypatch.setenv(module.THEIRS, str(tmp_path))
    module.have_folder()
    assert module.OURS not in os.environ


def test_the_folder_of_a_process_that_has_started_this_one_is_used_only_where_it_was_started_by_multiprocessing(
    module, monkeypatch, tmp_path
):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv(module.OURS, str(other))
    assert module.own_folder() is None
    monkeypatch.setattr(module.multiprocessing, "parent_process", object)
    assert module.own_folder() == other
    other.rmdir()
    assert module.own_folder() is None


def test_a_folder_that_a_killed_process_left_goes_with_the_next_start_and_a_living_ones_stays(module, tmp_path):
    module.have_folder()
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
        "import os; from vllm_lazy_grammar.adapter import metric_files as m\n"
        "m.have_folder(); print(os.environ[m.OURS], os.path.isdir(os.environ[m.OURS]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    folder, existed = run.stdout.split()[-2:]
    assert existed == "True"
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()
