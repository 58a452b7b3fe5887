"""The worker: compiles and rows that a request will need, while its prompt is still being read.

Guarantees of a `Worker`:
- A task runs at most once, in the order of its priority, then of its submission; a cancelled task that has not started never starts.
- Whoever waits for a task waits for that task only, and gets its error as itself; nobody else does.
- No lock is held while a task runs. Threads start with the first task, and again in a forked child: a child has none of its parent's.
The race avoided: `cancel` and the start of a task are decided under one lock, so a task is either cancelled or run, never both.

Invariants:
- With `threads=0` the same work runs inline, in `submit`.
- Work is done on objects of its own (compiled grammars, fresh matchers), never on a live session's.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

COMPILE, AHEAD, ENDINGS, ROWS = 0, 1, 2, 3
"""Priorities: somebody may wait for a compile; what is compiled ahead may be needed soon, as how a grammar ends; rows only save time."""


_NICE = 10

_here = threading.local()


class Task(Generic[T]):
    """A piece of work and its result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._lock = threading.Lock()
        self.future: Future[T] = Future()

    def done(self) -> bool:
        """Whether it has run, failed or been cancelled."""
        return self.future.done()

    def result(self) -> T:
        """Wait for it; raises its own error, or CancelledError."""
        return self.future.result()

    def cancel(self) -> bool:
        """True where it will never run; false where it has started or is done."""
        with self._lock:
            cancelled = self.future.cancel()
            if cancelled:
                self._work = None
        return cancelled

    def run(self) -> None:
        """Run it here and now, unless it was cancelled or somebody runs it, or has."""
        with self._lock:
            work, self._work = self._work, None
            if work is None or not self.future.set_running_or_notify_cancel():
                return
        with _Delivered(self.future):
            self.future.set_result(work())


class Once:
    """A future's callback that keeps nothing once it was called: a future keeps its callbacks for ever."""

    def __init__(self, work: Callable[[Future[Any]], object]) -> None:
        self._work: Callable[[Future[Any]], object] | None = work

    def __call__(self, future: Future[Any]) -> None:
        """Do it, the first time."""
        work, self._work = self._work, None
        if work is not None:
            work(future)


class _Delivered:
    """Whatever is raised inside belongs to whoever waits for the future, as itself, and not to the thread that it was raised on."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True


def _yield_to_others() -> None:
    """Give this thread, and those that it starts, a lower priority: where cores are few the model's threads come first."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def on_worker() -> bool:
    """Whether this thread is a worker's: nobody waits for what it waits for."""
    return getattr(_here, "works", False)


class Worker:
    """Daemon threads over one queue.

    Args:
        threads: how many; 0 runs every task inline.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._count = itertools.count()
        self._start_over()

    def _start_over(self) -> None:
        self._pid = os.getpid()
        self._ready = threading.Condition()
        self._queue: list[tuple[int, int, Task[Any]]] = []
        self._started: list[threading.Thread] = []
        self._held = self._closed = False

    @property
    def is_inline(self) -> bool:
        """Whether everything runs in `submit`."""
        return not self._threads

    def submit(self, work: Callable[[], T], priority: int = COMPILE) -> Task[T]:
        """Queue `work`; inline it has run when this returns."""
        task = Task(work)
        if not self._threads:
            task.run()
            return task
        if self._pid != os.getpid():
            self._start_over()
        with self._ready:
            is_closed = self._closed
            if not is_closed:
                heapq.heappush(self._queue, (priority, next(self._count), task))
                self._ready.notify()
            missing = 0 if self._started or is_closed else self._threads
        if missing:
            self._start(missing)
        if is_closed:
            task.cancel()
        return task

    def again(self, task: Task[Any], priority: int) -> None:
        """Queue a task once more, with another priority: what comes to it first runs it."""
        if self._pid == os.getpid() and not task.done():
            with self._ready:
                heapq.heappush(self._queue, (priority, next(self._count), task))
                self._ready.notify()

    def _start(self, count: int) -> None:
        new = [threading.Thread(target=self._loop, name=f"lazy-grammar-{i}", daemon=True) for i in range(count)]
        with self._ready:
            if self._started:
                return
            self._started = new
        for thread in new:
            thread.start()

    def _loop(self) -> None:
        _here.works = True
        _yield_to_others()
        while (task := self._next()) is not None:
            task.run()
            del task

    def _next(self) -> Task[Any] | None:
        with self._ready:
            while self._held or not self._queue:
                if self._closed and not self._queue:
                    return None
                self._ready.wait()
            return heapq.heappop(self._queue)[2]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the queue: nothing that has not started starts inside the block. For tests of ordering."""
        with self._ready:
            self._held = True
        try:
            yield
        finally:
            with self._ready:
                self._held = False
                self._ready.notify_all()

    def close(self) -> None:
        """Cancel what has not started, and what comes later, and end the threads once they are idle."""
        with self._ready:
            left, self._queue = self._queue, []
            self._held, self._closed = False, True
            self._ready.notify_all()
            started = self._started
        for _, _, task in left:  # outside the lock: who waits for a task is told, and may hold a lock of its own
            task.cancel()
        for thread in started:
            thread.join()
