"""What is counted, on vLLM's own /metrics.

The engine counts, and another process serves /metrics. What crosses between them is a folder of files in the format of Prometheus'
multiprocess mode: the engine writes them, whoever is asked for /metrics reads them (see `metric_files`).

- Several API servers: vLLM itself has set such a folder up, and each of them reads all that lies there.
- One API server, or the offline ``LLM``: there is none, and making one vLLM's would take some of its own metrics away. A folder of our own is
  made by the process that makes the engine's configuration, and the registry that vLLM serves is told of it.

Invariants:
- vLLM's own metrics are those of a server without us. No name is rebound: a file in the folder, or a collector in the default registry, is
  all that vLLM sees.
- A fault here ends the metrics, with one line in the log, and nothing else.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_lazy_grammar.adapter import metric_files
from vllm_lazy_grammar.adapter.grammar import FAULTS
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.core import counts
from vllm_lazy_grammar.core.counts import METRICS, Change, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vllm_lazy_grammar.adapter.backend import Hold
    from vllm_lazy_grammar.adapter.faults import Fault
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.counts import Cache
    from vllm_lazy_grammar.core.trace import Trace

_RARELY = 1.0
"""Seconds between two looks at a cache whose bytes have to be added up."""

_COLLECTOR: Any = MultiProcessCollector
"""Prometheus' client says nothing of its type."""


def prepare() -> None:
    """Have a folder for this process and those that it starts, where vLLM has none."""
    try:
        metric_files.have_folder()
    except OSError as error:
        logger.error("Lazy grammars are not counted on /metrics: no folder can be made: %s", error)


# -- who writes -------------------------------------------------------------------------------------------------------


def tally(vllm_config: Any) -> Tally | None:
    """The counts of an engine, written to where /metrics finds them; None where there is no such place."""
    folder = metric_files.folder()
    if folder is None:
        logger.warning("Lazy grammars are not counted on /metrics: what serves it did not start this engine")
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    labels = {"model_name": str(model.served_model_name), "engine": str(parallel.data_parallel_index)}
    files = metric_files.Files(folder, labels, stays=metric_files.THEIRS in os.environ)
    made = Tally(files.write)
    for series, value in made.values.items():
        files.write(series, value)
    return made


class EngineCounts:
    """What an engine counts; one whose tally is None counts nothing. Thread-safe.

    Args:
        start: makes the tally.
        caches: by name, looked at when a request is over.
        slow_caches: the same, of which the bytes have to be added up: looked at once a second at most.
    """

    def __init__(
        self, start: Callable[[], Tally | None], caches: Mapping[str, Cache], slow_caches: Mapping[str, Cache]
    ) -> None:
        self._caches, self._slow_caches = caches, slow_caches
        self._looked = float("-inf")
        self._tally: Tally | None = None
        try:
            self._tally = start()
        except FAULTS as error:
            self._give_up(error)

    def over(self, kind: str, hold: Hold, trace: Trace) -> None:
        """A request is over, and has given its compile back."""
        self._add(lambda: [*counts.of_request(kind, hold.origin, trace), *self._of_caches()])

    def compiled(self, compile_: Compile) -> None:
        """A compile is done, or has failed."""
        self._add(lambda: _of_compile(compile_))

    def waited(self, place: str, seconds: float) -> None:
        """Something waited for the worker; `place` is one of `counts.PLACES`."""
        self._add(lambda: [Change(counts.WAIT_SECONDS, seconds, place)])

    def unserved(self, kind: str) -> None:
        """A request is over before it had a grammar."""
        self._add(lambda: [Change(counts.REQUESTS, 1, kind), Change(counts.COMPILED_BY, 1, "none")])

    def ended(self, fault: Fault) -> None:
        """The engine ended a request."""
        self._add(lambda: [Change(counts.ENDED, 1, "client" if fault.field else "server")])

    def close(self) -> None:
        """Count no more."""
        self._tally = None

    def _of_caches(self) -> list[Change]:
        caches, now = dict(self._caches), time.monotonic()
        if now - self._looked >= _RARELY:
            self._looked = now
            caches |= self._slow_caches
        return [change for name, cache in caches.items() for change in counts.of_cache(name, cache)]

    def _add(self, changes: Callable[[], Sequence[Change]]) -> None:
        kept = self._tally  # another thread may close it
        if kept is None:
            return
        try:
            kept.add(changes())
        except FAULTS as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._tally = None
        logger.error("Lazy grammars are no more counted on /metrics: %s: %s", type(error).__name__, error)


def _of_compile(compile_: Compile) -> list[Change]:
    origin = "" if compile_.future.exception() is not None else compile_.future.result().origin
    return [Change(counts.COMPILE_SECONDS, compile_.seconds or 0.0, counts.compiler_of(origin))]


# -- who reads --------------------------------------------------------------------------------------------------------


class Collector:
    """Reads our own folder, for a registry of Prometheus' client.

    Args:
        folder: where engines write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed = False

    def describe(self) -> list[Metric]:
        """The metrics that there can be."""
        return [Metric(metric_files.base_name(metric), metric.help, metric.type) for metric in METRICS]

    def collect(self) -> list[Metric]:
        """What the engines have written; nothing where it can not be read: vLLM's own metrics are on the same page."""
        try:
            return list(_COLLECTOR(None, str(self._folder)).collect())
        except (*FAULTS, struct.error) as error:
            if not self._failed:
                logger.error("Lazy grammars are missing on /metrics: %s: %s", type(error).__name__, error)
            self._failed = True
            return []


_served: set[Path] = set()
_serving = threading.Lock()


def serve() -> None:
    """Let this process' /metrics show what the engines of our own folder count; where vLLM has a folder, it reads that itself."""
    folder = metric_files.own_folder()
    if metric_files.THEIRS in os.environ or folder is None:
        return
    with _serving:
        if folder not in _served:
            REGISTRY.register(Collector(folder))
            _served.add(folder)
