"""A folder in which an engine leaves its counts for whoever serves /metrics, and the files in it: those of Prometheus' multiprocess mode.

Invariants:
- Files of others in the folder are not touched, and no variable of Prometheus is set.
- A folder of ours goes with the process that made it. What a killed process left, folder or files, is known by a lock that nobody holds, and
  removed by the next start.
"""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
import weakref
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

from vllm_lazy_grammar.core.counts import SUM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_lazy_grammar.core.counts import Metric, Series

THEIRS = "PROMETHEUS_MULTIPROC_DIR"
"""Set by vLLM for several API servers, or by an operator."""

OURS = "LAZY_GRAMMAR_METRICS_DIR"
"""Set here, for the processes that this one starts."""

_FOLDER, _FILE = "lazy-grammar-metrics-", "lazygrammar-"
_LOCK = "owner.lock"
_PREFIXES = {"counter": "counter", "histogram": "histogram", "gauge": "gauge_mostrecent"}
"""How the names of files begin, by which Prometheus' client knows what is in them."""

_numbers = itertools.count()

_FILE_TYPE: Any = MmapedDict
_spelled: Any = floatToGoString
"""These of Prometheus' client say nothing of their types."""


# -- the folder -------------------------------------------------------------------------------------------------------


def have_folder() -> None:
    """Have a folder for this process and those that it starts, where vLLM has none. OSError where none can be made."""
    if THEIRS not in os.environ and own_folder() is None:
        _remove_left_behind(Path(tempfile.gettempdir()))
        os.environ[OURS] = str(_make_folder())


def folder() -> Path | None:
    """Where an engine of this process writes; None where there is no such place."""
    theirs = os.environ.get(THEIRS)
    return own_folder() if theirs is None else Path(theirs)


def own_folder() -> Path | None:
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


# -- the files --------------------------------------------------------------------------------------------------------


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
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)  # of a process that had the same id
        made = _FILE_TYPE(str(new))
        new.replace(path)  # now that it can be read
        return made

    def write(self, series: Series, value: float) -> None:
        """Write one value."""
        kind = series.metric.type
        key = self._keys.get(series)
        if key is None:
            key = self._keys[series] = self._key(series)
        self._files[kind].write_value(key, value, time.time() if kind == "gauge" else 0.0)

    def _key(self, series: Series) -> str:
        metric, value, part = series
        name, suffix, names, labels = base_name(metric), "", self._names, self._labels
        if metric.label:
            names, labels = (*names, metric.label), (*labels, value)
        if metric.type == "counter":
            suffix = "_total"
        elif part == SUM:
            suffix = "_sum"
        elif part is not None:
            suffix, names, labels = "_bucket", (*names, "le"), (*labels, _spelled(part))
        return mmap_key(name, name + suffix, list(names), list(labels), metric.help)


def base_name(metric: Metric) -> str:
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
