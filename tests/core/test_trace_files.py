"""Trace files: whole, in order of time, bounded, and written by a thread of their own."""

from __future__ import annotations

import threading

import pytest

from vllm_lazy_grammar.core import trace_files
from vllm_lazy_grammar.core.trace_files import Bounds, TraceFiles
from vllm_lazy_grammar.errors import SettingsError


def stamp(n):
    return f"20260101T0000{n:02}.000000"


def written(folder, bounds, texts, failed=None):
    problems = []
    files = TraceFiles(folder, bounds, failed or problems.append)
    for n, text in enumerate(texts):
        files.add(f"r/{n}", stamp(n), lambda text=text: text)
    files.close()
    assert not problems
    return sorted(path.name for path in folder.iterdir())


def test_a_file_per_request_named_by_time_and_request(tmp_path):
    assert written(tmp_path / "a" / "b", Bounds(9, 999), ["x", "y"]) == [
        "trace-20260101T000000.000000-r_0.jsonl",
        "trace-20260101T000001.000000-r_1.jsonl",
    ]
    assert (tmp_path / "a/b/trace-20260101T000001.000000-r_1.jsonl").read_text() == "y"


def test_the_oldest_go_where_there_are_too_many(tmp_path):
    assert written(tmp_path, Bounds(2, 999), "abcd") == [f"trace-{stamp(n)}-r_{n}.jsonl" for n in (2, 3)]


def test_the_oldest_go_where_they_are_too_large_together(tmp_path):
    assert written(tmp_path, Bounds(9, 25), ["x" * 10] * 4) == [f"trace-{stamp(n)}-r_{n}.jsonl" for n in (2, 3)]


def test_a_trace_that_is_too_large_alone_does_not_stay(tmp_path):
    assert written(tmp_path, Bounds(9, 25), ["x" * 26]) == []


def test_what_others_put_into_the_folder_is_left_alone(tmp_path):
    for name in ("notes.txt", "trace-mine.jsonl", "other.jsonl"):
        (tmp_path / name).write_text("x" * 100)
    assert written(tmp_path, Bounds(1, 25), "ab") == [
        "notes.txt", "other.jsonl", f"trace-{stamp(1)}-r_1.jsonl", "trace-mine.jsonl",
    ]  # fmt: skip


def test_the_content_is_made_on_the_writing_thread(tmp_path):
    threads = []
    files = TraceFiles(tmp_path, Bounds(9, 999), threads.append)
    files.add("r", stamp(0), lambda: threads.append(threading.get_ident()) or "x")
    files.close()
    assert threads != [threading.get_ident()]
    assert len(threads) == 1


def test_a_failure_is_told_and_the_next_trace_is_written(tmp_path):
    problems = []
    files = TraceFiles(tmp_path, Bounds(9, 999), problems.append)
    files.add("bad", stamp(0), lambda: 1 / 0)
    files.add("good", stamp(1), lambda: "x")
    files.close()
    assert [type(problem) for problem in problems] == [ZeroDivisionError]
    assert [path.name for path in tmp_path.iterdir()] == [f"trace-{stamp(1)}-good.jsonl"]


def test_too_many_waiting_are_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_files, "MAX_WAITING", 2)
    go = threading.Event()
    files = TraceFiles(tmp_path, Bounds(9, 999), print)
    taken = [files.add(f"r{n}", stamp(n), lambda: go.wait() and "x") for n in range(4)]
    assert taken == [True, True, False, False]
    assert files.dropped == 2
    go.set()
    files.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_can_not_be_made_is_a_setting_that_can_not_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"trace_dir: no trace can be written there"):
        TraceFiles(tmp_path / "file" / "below", Bounds(1, 1), print)
