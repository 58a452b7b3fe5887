"""One file per traced request in a folder that stays small, written by a thread of its own.

Guarantees:
- `add` does no input or output and does not wait: it hands over a piece of work. Where more than `MAX_WAITING` wait, the newest is dropped, and counted.
- A file appears under its name once it is whole. After each one the oldest of the folder go until number and bytes are within the bounds;
  several processes may share a folder.
- Only files named as these are named are ever removed.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from vllm_lazy_grammar.core.prewarm import Worker
from vllm_lazy_grammar.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

MAX_WAITING = 256
_CLOSE_SECONDS = 5.0
_NAME = re.compile(r"trace-\d{8}T\d{6}\.\d{6}-[\w.-]*\.jsonl")
_UNSAFE = re.compile(r"[^\w-]+", re.ASCII)
_ID_LENGTH = 80


class Bounds(NamedTuple):
    """What a folder may hold of traces: files, and their bytes together."""

    files: int
    size: int


class TraceFiles:
    """Writes traces into a folder.

    Args:
        folder: where; made where it is missing.
        bounds: what it may hold.
        failed: called, on the writing thread, with what went wrong there.

    Attributes:
        dropped: traces that were not written because too many waited.

    Raises:
        SettingsError: the folder can not be made or written to.
    """

    def __init__(self, folder: Path, bounds: Bounds, failed: Callable[[BaseException], None]) -> None:
        self._folder, self._bounds, self._failed = folder, bounds, failed
        self._worker = Worker(1)
        self._waiting = threading.Semaphore(MAX_WAITING)
        self._count = itertools.count()
        self.dropped = 0
        _refuse_unwritable(folder)

    def add(self, request_id: str, time: str, text: Callable[[], str]) -> bool:
        """Have a file written; false where it is dropped.

        Args:
            request_id: becomes part of the name.
            time: as ``20260131T235959.000000``; the name begins with it, so that names are in the order of time.
            text: makes the content, on the writing thread.
        """
        if not self._waiting.acquire(blocking=False):
            self.dropped += 1
            return False
        name = f"trace-{time}-{_UNSAFE.sub('_', request_id)[:_ID_LENGTH]}.jsonl"
        self._worker.submit(lambda: self._write(name, text)).future.add_done_callback(self._tell)
        return True

    def _write(self, name: str, text: Callable[[], str]) -> None:
        try:
            part = self._folder / f".{name}.{os.getpid()}.{next(self._count)}"
            part.write_text(text(), "utf-8")
            part.replace(self._folder / name)
            self._remove_oldest()
        finally:
            self._waiting.release()

    def _tell(self, written: Future[None]) -> None:
        """Tell what went wrong, whatever it is; the next trace is written."""
        error = None if written.cancelled() else written.exception()
        if error is not None:
            self._failed(error)

    def _remove_oldest(self) -> None:
        with os.scandir(self._folder) as entries:
            found = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))
        sizes = {name: size for name in found if (size := _size(self._folder / name)) is not None}
        total, left = sum(sizes.values()), len(sizes)
        for name, size in sizes.items():
            if left <= self._bounds.files and total <= self._bounds.size:
                return
            (self._folder / name).unlink(missing_ok=True)
            total, left = total - size, left - 1

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and end the thread."""
        last = self._worker.submit(lambda: None)
        with suppress(TimeoutError):  # what is not written by then is given up
            last.future.result(_CLOSE_SECONDS)
        self._worker.close()


def _size(path: Path) -> int | None:
    """Bytes; None where another process has removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _refuse_unwritable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        field = "additional_config.lazy_grammar.trace_dir"
        raise SettingsError(field, str(folder), f"no trace can be written there: {error}") from error
