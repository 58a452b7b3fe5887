"""The server fixtures themselves: what they send, and that nothing they start outlives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import servers
from tests.serving.servers import Flags, Pool, Server, ServerError, lazy, run_offline

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"


def group_members(group: int) -> list[str]:
    listed = subprocess.run(["ps", "-e", "-o", "pgid=,stat=,pid="], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    return [pid for pgid, stat, pid in lines if int(pgid) == group and not stat.startswith("Z")]


def test_stopping_a_server_ends_its_whole_process_group(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    server = Server(Flags(), process, 1, tmp_path / "log")
    assert process.pid == os.getpgid(process.pid)
    server.stop()
    assert group_members(process.pid) == []


def test_a_server_that_dies_at_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flags, "model_path", lambda self: tmp_path)
    monkeypatch.setattr(
        Flags, "command", lambda self, path, port: [sys.executable, "-c", "raise SystemExit('no such flag')"]
    )
    pool = Pool(tmp_path, print)
    for _ in range(2):
        with pytest.raises(ServerError, match="no such flag"):
            pool.get(Flags())
    assert len(list(tmp_path.glob("server-*.log"))) == 1


def test_a_request_without_triggers_has_no_vllm_xargs() -> None:
    assert lazy({"json": {}}) == {"structured_outputs": {"json": {}}}
    assert lazy({"regex": "a"}, "word:<a>", grammar_rearm=1) == {
        "structured_outputs": {"regex": "a"},
        "vllm_xargs": {"grammar_triggers": ["word:<a>"], "grammar_rearm": 1},
    }


def test_an_offline_script_gives_back_what_its_main_returned(tmp_path: Path) -> None:
    assert run_offline("def main():\n    return [1, {'a': None}]", tmp_path) == [1, {"a": None}]


def test_an_offline_script_that_fails_or_hangs_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="ZeroDivisionError"):
        run_offline("def main():\n    1 / 0", tmp_path)
    with pytest.raises(ServerError, match="ended with -9"):
        run_offline("import time\ndef main():\n    time.sleep(600)", tmp_path, timeout=0.5)


def test_the_dummy_model_has_more_ids_than_its_tokenizer(tmp_path: Path) -> None:
    folder = servers.dummy_model(tmp_path / "dummy")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = len({*tokenizer["model"]["vocab"], *(token["content"] for token in tokenizer["added_tokens"])})
    assert known < json.loads((folder / "config.json").read_text())["vocab_size"]
