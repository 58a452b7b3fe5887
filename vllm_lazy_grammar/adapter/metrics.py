"""What is counted, on vLLM's own /metrics.

The engine counts, and another process serves /metrics. What crosses between them is a folder of files in the format of Prometheus'
multiprocess mode: the engine writes them, whoever is asked for /metrics reads them.

- Several API servers: vLLM itself has set such a folder up (PROMETHEUS_MULTIPROC_DIR), and each of them reads all that lies there.
- One API server, or the offline ``LLM``: that variable is not set, and setting it would take some of vLLM's own metrics away. A folder of our
  own is made by the process that makes the engine's configuration, and the registry that vLLM serves is told of it.

Invariants:
- vLLM's own metrics are those of a server without us: none of its files is touched, and no variable of Prometheus is set.
- No name is rebound: a file in the folder, or a collector in the default registry, is all that vLLM sees.
- A folder goes with the process that made it. What a killed process left is known by a lock that nobody holds, and removed by the next start.
- A fault here ends the metrics, with one line in the log, and nothing else.
"""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
import weakref
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString

from vllm_lazy_grammar.adapter.grammar import FAULTS
from vllm_lazy_grammar.adapter.log import logger
from vllm_lazy_grammar.core import counts
from vllm_lazy_grammar.core.counts import METRICS, SUM, Change, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_lazy_grammar.adapter.backend import Hold
    from vllm_lazy_grammar.adapter.faults import Fault
    from vllm_lazy_grammar.core.compiles import Compile
    from vllm_lazy_grammar.core.counts import Cache, Series
    from vllm_lazy_grammar.core.trace import Trace

THEIRS = "PROMETHEUS_MULTIPROC_DIR"
"""Set by vLLM for several API servers, or by an operator."""

OURS = "LAZY_GRAMMAR_METRICS_DIR"
"""Set here, for the processes that this one starts."""

_FOLDER, _FILE = "lazy-grammar-metrics-", "lazygrammar-"
_LOCK = "owner.lock"
_PREFIXES = {"counter": "counter", "histogram": "histogram", "gauge": "gauge_mostrecent"}
"""How the names of files begin, by which Prometheus' client knows what is in them."""

_RARELY = 1.0
"""Seconds between two looks at a cache whose bytes have to be added up."""

_numbers = itertools.count()

_FILE_TYPE: Any = MmapedDict
_COLLECTOR: Any = MultiProcessCollector
_spelled: Any = floatToGoString
"""These of Prometheus' client say nothing of their types."""


# -- the folder -------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Have a folder for this process and those that it starts, where vLLM has none."""
    if THEIRS in os.environ or _own_folder() is not None:
        return
    try:
        _remove_left_behind(Path(tempfile.gettempdir()))
        os.environ[OURS] = str(_make_folder())
    except OSError as error:
        logger.error("Lazy grammars are not counted on /metrics: no folder can be made: %s", error)


def _own_folder() -> Path | None:
    """The folder of this process, or of the one that started it; None where there is none (any more)."""
    path = os.environ.get(OURS)
    known = path is not None and (path in _made or multiprocessing.parent_process() is not None)
    return Path(path) if path is not None and known and Path(path).is_dir() else None


_made: dict[str, int] = {}
"""Folders that this process made, or the one that it was forked from, and the lock of each: held as long as one of them lives."""


def _make_folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix=_FOLDER))
    _made[str(path)] = _hold(path / _LOCK)
    # At this process' end, whatever way a process of multiprocessing ends, behind the end of those that it started; not in a forked one.
    Finalize(None, shutil.rmtree, (path, True), exitpriority=-1)
    return path


def _hold(path: Path) -> int:
    """Make a file that is locked before it has its name."""
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(path)
    return descriptor


def _is_left_behind(lock: Path) -> bool:
    """Whether all processes that held this lock are gone."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:  # removed meanwhile, or another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_left_behind(folder: Path) -> None:
    for lock in folder.glob(f"{_FOLDER}*/{_LOCK}"):
        if lock.parent.lstat().st_uid == os.getuid() and _is_left_behind(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)


# -- who writes -------------------------------------------------------------------------------------------------------


class Files:
    """The files of one engine in a folder; used by one thread at a time. They are closed when this object goes.

    Args:
        folder: where.
        labels: that every series has, before its own.
        stays: the files outlive this object, until another engine's start: whoever reads the folder would fail where one goes meanwhile.
    """

    def __init__(self, folder: Path, labels: Mapping[str, str], *, stays: bool) -> None:
        _remove_left_files(folder)
        self._name = f"{_FILE}{os.getpid()}-{next(_numbers)}"
        self._names, self._labels = tuple(labels), tuple(labels.values())
        lock = _hold(folder / f"{self._name}.lock")
        self._files = {kind: self._open(folder / f"{prefix}_{self._name}.db") for kind, prefix in _PREFIXES.items()}
        self._keys: dict[Series, str] = {}
        stem = "" if stays else self._name
        weakref.finalize(self, _close, os.getpid(), list(self._files.values()), lock, folder, stem)

    @staticmethod
    def _open(path: Path) -> Any:
        path.unlink(missing_ok=True)  # of a process that had the same id
        return _FILE_TYPE(str(path))

    def write(self, series: Series, value: float) -> None:
        """Write one value."""
        kind = series.metric.type
        key = self._keys.get(series)
        if key is None:
            key = self._keys[series] = self._key(series)
        self._files[kind].write_value(key, value, time.time() if kind == "gauge" else 0.0)

    def _key(self, series: Series) -> str:
        metric, value, part = series
        name, suffix, names, labels = _base_name(metric), "", self._names, self._labels
        if metric.label:
            names, labels = (*names, metric.label), (*labels, value)
        if metric.type == "counter":
            suffix = "_total"
        elif part == SUM:
            suffix = "_sum"
        elif part is not None:
            suffix, names, labels = "_bucket", (*names, "le"), (*labels, _spelled(part))
        return mmap_key(name, name + suffix, list(names), list(labels), metric.help)


def _base_name(metric: counts.Metric) -> str:
    """The name without what a counter's sample has behind it."""
    return metric.name.removesuffix("_total")


def _close(pid: int, files: Sequence[Any], lock: int, folder: Path, stem: str) -> None:
    if pid != os.getpid():  # a fork of whose they are
        return
    for file in files:
        file.close()
    if stem:
        _remove_files(folder, stem)
    os.close(lock)


def _remove_files(folder: Path, stem: str) -> None:
    for path in (*folder.glob(f"*_{stem}.db"), folder / f"{stem}.lock"):
        path.unlink(missing_ok=True)


def _remove_left_files(folder: Path) -> None:
    for lock in folder.glob(f"{_FILE}*.lock"):
        if _is_left_behind(lock):
            _remove_files(folder, lock.stem)


def tally(vllm_config: Any) -> Tally | None:
    """The counts of an engine, written to where /metrics finds them; None where there is no such place."""
    folder = os.environ.get(THEIRS) or _own_folder()
    if folder is None:
        logger.warning("Lazy grammars are not counted on /metrics: what serves it did not start this engine")
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    labels = {"model_name": str(model.served_model_name), "engine": str(parallel.data_parallel_index)}
    files = Files(Path(folder), labels, stays=THEIRS in os.environ)
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
        if self._tally is not None:
            self._add(lambda: [*counts.of_request(kind, hold.origin, trace), *self._of_caches()])

    def compiled(self, compile_: Compile) -> None:
        """A compile is done, or has failed."""
        if self._tally is not None:
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
        if self._tally is None:
            return
        try:
            self._tally.add(changes())
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
        return [Metric(_base_name(metric), metric.help, metric.type) for metric in METRICS]

    def collect(self) -> list[Metric]:
        """What the engines have written; nothing where it can not be read: vLLM's own metrics are on the same page."""
        try:
            return list(_COLLECTOR(None, str(self._folder)).collect())
        except FAULTS as error:
            if not self._failed:
                logger.error("Lazy grammars are missing on /metrics: %s: %s", type(error).__name__, error)
            self._failed = True
            return []


_served: set[Path] = set()
_serving = threading.Lock()


def serve() -> None:
    """Let this process' /metrics show what the engines of our own folder count; where vLLM has a folder, it reads that itself."""
    folder = _own_folder()
    if THEIRS in os.environ or folder is None:
        return
    with _serving:
        if folder not in _served:
            REGISTRY.register(Collector(folder))
            _served.add(folder)
