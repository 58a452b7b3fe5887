"""Real `vllm serve` processes for the tests, one per set of flags, alive only while a test needs it.

Invariants:
- At most as many servers run at once as one test names.
- A server is ended by the id of the process group it was started in, however the tests end.
- Nothing here imports vLLM: servers are processes, and offline engines run in a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from openai import AsyncOpenAI, OpenAI

from tests.serving.models import CHECKOUT, demo_model, dummy_model, mistral_model, thinking_model
from tests.serving.wishes import PROCESSOR

MODEL = "model"
"""The name under which every server serves."""

_START_SECONDS = 600.0  # usually 30 to 60; a machine that is busy has been seen to let a new process wait for minutes
_STOP_SECONDS = 20.0
_TAIL_LINES = 60
_NOISE = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")
_PATH = os.pathsep.join(
    filter(None, [str(CHECKOUT), str(CHECKOUT / "tests/serving/plugins"), os.environ.get("LAZY_GRAMMAR_VLLM")])
)
"""The checkout, vLLM plugins of the tests' own (VLLM_PLUGINS says which of them a server loads), and before the installed packages another vLLM
where ``LAZY_GRAMMAR_VLLM`` says where that lies."""

_CALM = "lazy_grammar_test_calm"

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_PLUGINS": f"lazy_grammar,{_CALM}",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """A set of flags; equal ones share a server.

    Args:
        model: `demo`, `dummy` (large vocabulary), `thinking` (the demo model with `<think>`, `</think>`, `<tool_call>`) or `mistral` (tekken).
        args: command line arguments behind the common ones.
        dtype: `float32`, in which outputs can be compared, and which a CPU without AVX512 computes far quicker than `bfloat16`.
        env: variables set for the server, as pairs.
        max_model_len: tokens of context.
    """

    model: str = "demo"
    args: tuple[str, ...] = ("--guided-decoding-backend", "lazy")
    dtype: str = "float32"
    env: tuple[tuple[str, str], ...] = ()
    max_model_len: int = 2048

    def command(self, model_path: Path, port: int) -> list[str]:
        """The whole command line."""
        dummy = ["--load-format", "dummy"] if self.model in ("dummy", "mistral") else []
        common = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager"]
        sizes = ["--dtype", self.dtype, "--max-model-len", str(self.max_model_len)]
        serve = [str(Path(sys.executable).with_name("vllm")), "serve", str(model_path), *self.args]
        return [*serve, *common, *sizes, *dummy]

    def model_path(self) -> Path:
        """The model's folder, made where it is missing."""
        if self.model == "demo":
            return demo_model()
        made = {"dummy": dummy_model, "thinking": thinking_model, "mistral": mistral_model}
        return made[self.model](Path(tempfile.gettempdir()) / f"lazy-grammar-tests-{os.getuid()}" / self.model)

    def __str__(self) -> str:
        env = [f"{name}={value}" for name, value in self.env]
        return " ".join([*env, self.model, self.dtype, *self.args])


_WISHING = ("--logits-processors", PROCESSOR)
LAZY = Flags()
WISHES = Flags(args=(*LAZY.args, *_WISHING), env=(("VLLM_LOGGING_LEVEL", "DEBUG"),))
DEEPSEEK_R1 = Flags(
    model="thinking",
    args=(
        *("--structured-outputs-config", '{"backend": "lazy", "disable_any_whitespace": true}'),
        *("--reasoning-parser", "deepseek_r1"),
        *_WISHING,
    ),
)
QWEN3 = Flags(model="thinking", args=(*LAZY.args, "--reasoning-parser", "qwen3", *_WISHING))
IN_REASONING = Flags(
    model="thinking",
    args=(
        *("--structured-outputs-config.backend", "lazy", "--structured-outputs-config.enable_in_reasoning", "true"),
        *("--reasoning-parser", "deepseek_r1"),
        *_WISHING,
    ),
)
MISTRAL = Flags(
    model="mistral",
    args=(
        *(*LAZY.args, "--tokenizer-mode", "mistral", "--config-format", "mistral"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "mistral"),
    ),
)


def tool_flags(parser: str) -> tuple[str, ...]:
    """What vLLM needs to be told for tool calls; the demo model's own template knows no tools."""
    template = ("--chat-template", str(CHECKOUT / "configs/demo_tools.jinja"))
    return ("--enable-auto-tool-choice", "--tool-call-parser", parser, *template)


def calling(parser: str, model: str = "demo", *more: str) -> Flags:
    """A server that serves tool calls; its answers can be wished for and compared."""
    return Flags(model, (*LAZY.args, *tool_flags(parser), *_WISHING, *more))


DEMO = Flags(args=(*LAZY.args, *tool_flags("hermes")))
HERMES = calling("hermes")
WITNESS = Path(tempfile.gettempdir()) / f"lazy-grammar-tests-{os.getuid()}" / f"witness-{os.getpid()}"
"""Where processes with the witness plugin write down which seams were called."""

_WITNESSED = (
    ("VLLM_PLUGINS", f"lazy_grammar,lazy_grammar_test_witness,{_CALM}"),
    ("LAZY_GRAMMAR_WITNESS", str(WITNESS)),
)
TIGHT = Flags(
    args=(
        *("--config", str(CHECKOUT / "configs/engine.yaml"), *_WISHING),
        *(
            "--block-size",
            "32",
            "--num-gpu-blocks-override",
            "13",
            "--max-num-batched-tokens",
            "64",
            "--max-num-seqs",
            "16",
        ),
    ),
    env=_WITNESSED,
    max_model_len=384,
)
"""A KV cache for 12 blocks of 32 tokens, prompts cut into chunks of 64; configured by the example file; its seams are watched."""

ASYNC = Flags(
    args=(*LAZY.args, "--async-scheduling", *_WISHING),
    env=(("VLLM_PLUGINS", f"lazy_grammar,lazy_grammar_test_async,{_CALM}"),),
)
API_SERVERS_2 = Flags(args=(*LAZY.args, "--api-server-count", "2", "--enable-log-requests", *_WISHING))
_TWO_CORES = (("VLLM_CPU_OMP_THREADS_BIND", "0|1"),)
DATA_PARALLEL_2 = Flags(args=(*LAZY.args, "--data-parallel-size", "2", *_WISHING), env=_TWO_CORES)
TENSOR_PARALLEL_2 = Flags(model="dummy", args=(*LAZY.args, "--tensor-parallel-size", "2"), env=_TWO_CORES)
"""Dummy weights: the demo model's 9 heads can not be halved."""

TRACES = Path(tempfile.gettempdir()) / f"lazy-grammar-tests-{os.getuid()}" / f"traces-{os.getpid()}"
"""Where the server with traces writes them."""

TRACED = Flags(
    args=(
        *(*LAZY.args, *_WISHING, "--additional-config"),
        json.dumps({"lazy_grammar": {"trace_dir": str(TRACES), "metrics": False}}),
    ),
)
"""With traces, and without metrics."""

XGRAMMAR = Flags(args=("--structured-outputs-config.backend", "xgrammar", *tool_flags("hermes")))
STOCK = Flags(args=XGRAMMAR.args, env=(("VLLM_PLUGINS", _CALM),))
"""The same server without the plugin."""

DUMMY_LAZY = Flags(model="dummy", args=(*LAZY.args, *_WISHING), max_model_len=8192)


class ServerError(RuntimeError):
    """A server did not come up; carries the end of its log."""


class Server:
    """A running `vllm serve`. Made by `start`, ended by `stop`.

    Args:
        flags: what it was started with.
        process: its main process, leader of its own process group.
        port: where it listens on the loopback address.
        log_path: its standard output and error.
    """

    def __init__(self, flags: Flags, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.flags = flags
        self.process = process
        self.port = port
        self.log_path = log_path

    @classmethod
    def start(cls, flags: Flags, log_path: Path) -> Self:
        """Start it and wait until it is healthy. ServerError with the log's end where it is not."""
        port = free_port()
        command = flags.command(flags.model_path(), port)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment(flags.env), start_new_session=True
            )
        server = cls(flags, process, port, log_path)
        try:
            server.wait_until_healthy()
        except BaseException:
            server.stop()
            raise
        return server

    def wait_until_healthy(self) -> None:
        """Return once /health answers. ServerError where the process ends or time is up."""
        deadline = time.monotonic() + _START_SECONDS
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise ServerError(f"vllm serve ended with {self.process.returncode}: {self.flags}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"vllm serve is not up after {_START_SECONDS} s: {self.flags}\n{self.log_tail()}")
            time.sleep(0.25)

    def is_healthy(self) -> bool:
        """Whether /health answers with 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """End the server's whole process group, gently at first, and wait for it."""
        self.hang_up()
        _signal_group(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what is left is killed below, and waited for
            self.process.wait(_STOP_SECONDS)
        _signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def base_url(self) -> str:
        """The root of the OpenAI API."""
        return f"http://127.0.0.1:{self.port}/v1"

    @cached_property
    def client(self) -> OpenAI:
        """An OpenAI client of this server that never retries; closed with the server."""
        return OpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=120)

    def hang_up(self) -> None:
        """Close the client's connections; the next request opens new ones."""
        if "client" in self.__dict__:
            self.client.close()
            del self.client

    @contextlib.contextmanager
    def only_api_server(self, number: int) -> Iterator[None]:
        """Of several API servers only this one answers inside the block: the others are stopped, and go on behind it. Which of them the kernel
        lets accept a connection is otherwise chance, and has been one and the same for 128 requests."""
        pids = {int(n): int(pid) for n, pid in re.findall(r"\(ApiServer_(\d+) pid=(\d+)\)", self.log())}
        others = [pid for n, pid in pids.items() if n != number]
        self.hang_up()
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)
            self.hang_up()

    def async_client(self) -> AsyncOpenAI:
        """A new asynchronous client, for `async with`."""
        return AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=240)

    def log(self) -> str:
        """All that the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """The last lines of the log, without vLLM's debug lines and what nanobind says about itself when an interpreter ends."""
        lines = [line for line in self.log().splitlines() if not line.startswith(_NOISE) and not _is_debug(line)]
        return "\n".join(lines[-_TAIL_LINES:])


def _is_debug(line: str) -> bool:
    return " DEBUG " in line and "Request " not in line


@dataclass(slots=True)
class Pool:
    """The servers of one test session.

    Args:
        folder: where logs are kept.
        say: told when a server is started.
    """

    folder: Path
    say: Callable[[str], None]
    running: dict[Flags, Server] = field(default_factory=dict)
    failed: dict[Flags, str] = field(default_factory=dict)

    def get(self, flags: Flags) -> Server:
        """The server with these flags, started where it is not running; a failed start is not tried again."""
        if flags in self.failed:
            raise ServerError(self.failed[flags])
        if flags not in self.running:
            self.running[flags] = self._start(flags)
        return self.running[flags]

    def _start(self, flags: Flags) -> Server:
        self.say(f"starting a server: {flags}")
        began = time.monotonic()
        try:
            server = Server.start(flags, self.folder / f"server-{len(list(self.folder.iterdir()))}.log")
        except ServerError as error:
            self.failed[flags] = str(error)
            raise
        self.say(f"up after {time.monotonic() - began:.0f} s, log in {server.log_path}")
        return server

    def keep_only(self, wanted: Iterable[Flags]) -> None:
        """Stop every server whose flags are not among `wanted`."""
        kept = set(wanted)
        for flags in [flags for flags in self.running if flags not in kept]:
            self.running.pop(flags).stop()


def environment(extra: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """The environment of a server or an offline engine: this process's, small and off the network, `_PATH` importable."""
    return {**os.environ, "PYTHONPATH": _PATH, **_ENVIRONMENT, **_own_core(), **dict(extra)}


def _own_core() -> dict[str, str]:
    """Where several processes test side by side, a core for the model of each: vLLM would bind them all to the same one."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": str(cores[int(worker.removeprefix("gw")) % len(cores)])}


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def lazy(structure: dict[str, Any], *triggers: str, **options: object) -> dict[str, Any]:
    """The `extra_body` of a request with a structured output behind triggers; without any, an eager one."""
    xargs = {**({"grammar_triggers": list(triggers)} if triggers else {}), **options}
    return {"structured_outputs": structure, **({"vllm_xargs": xargs} if xargs else {})}


def run_offline(source: str, folder: Path, env: Iterable[tuple[str, str]] = (), timeout: float = 280) -> Any:
    """Run `source`, which defines `main()`, in a fresh interpreter; what `main()` returned, through JSON.

    Raises:
        ServerError: with the end of its output, where it did not end well.
    """
    result = folder / "result.json"
    script = folder / "offline.py"
    script.write_text(
        f"import json, pathlib\n{source}\n\n"
        "if __name__ == '__main__':\n"
        f"    pathlib.Path({str(result)!r}).write_text(json.dumps(main()))\n"
    )
    log_path = folder / "offline.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(env),
            start_new_session=True,
        )
    _wait_or_kill(process, timeout)
    if process.returncode != 0:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise ServerError(f"the offline script ended with {process.returncode}\n{tail}")
    return json.loads(result.read_text())


def _wait_or_kill(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Wait for the process; its whole group is gone afterwards, whatever happened."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the return code, set by the kill below, says so
            process.wait(timeout)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group has ended
        os.killpg(group, number)
