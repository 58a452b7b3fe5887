"""The worker: order, joining, cancelling and forking, without sleeping."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError, Future

import pytest

from vllm_lazy_grammar.core.prewarm import COMPILE, ROWS, Once, Worker


@pytest.fixture
def worker():
    worker = Worker(1)
    yield worker
    worker.close()


def test_compiles_run_before_rows_and_each_in_the_order_of_submission(worker):
    ran = []
    with worker.held():
        tasks = [worker.submit(lambda n=n: ran.append(n), p) for n, p in enumerate((ROWS, COMPILE, ROWS, COMPILE))]
    for task in tasks:
        task.result()
    assert ran == [1, 3, 0, 2]


def test_a_task_that_was_cancelled_before_it_started_never_starts(worker):
    ran = []
    with worker.held():
        first, second = worker.submit(lambda: ran.append(1)), worker.submit(lambda: ran.append(2))
        assert first.cancel()
    second.result()
    assert ran == [2]
    with pytest.raises(CancelledError):
        first.result()


def test_a_task_that_has_started_can_not_be_cancelled_and_its_result_is_there(worker):
    started, go = threading.Event(), threading.Event()

    def work():
        started.set()
        go.wait()
        return 7

    task = worker.submit(work)
    started.wait()
    assert not task.cancel()
    go.set()
    assert task.result() == 7


def test_an_error_reaches_who_waits_for_it_as_itself_and_nobody_else(worker):
    error = KeyError("mine")

    def fail():
        raise error

    bad, good = worker.submit(fail), worker.submit(lambda: "fine")
    with pytest.raises(KeyError) as caught:
        bad.result()
    assert caught.value is error
    assert good.result() == "fine"


def test_without_threads_the_same_work_runs_inline():
    here = []
    task = Worker(0).submit(lambda: here.append(threading.current_thread()))
    assert task.done()
    assert here == [threading.current_thread()]


def test_waiting_for_one_task_does_not_wait_for_those_behind_it(worker):
    go = threading.Event()
    first, behind = worker.submit(lambda: 1), worker.submit(go.wait)
    assert first.result() == 1
    assert not behind.done()
    go.set()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_starts_its_own_worker(worker):
    assert worker.submit(os.getpid).result() == os.getpid()
    child = os.fork()
    if not child:  # pragma: no cover -- the child's exit code is what is tested
        os._exit(0 if worker.submit(os.getpid).result() == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_closing_cancels_what_has_not_started():
    worker = Worker(1)
    go, started = threading.Event(), threading.Event()
    running = worker.submit(lambda: (started.set(), go.wait()))
    waiting = worker.submit(lambda: None)
    started.wait()
    closer = threading.Thread(target=worker.close)
    closer.start()
    while not waiting.done():
        pass
    go.set()
    closer.join()
    assert running.done()
    assert waiting.future.cancelled()


def test_a_task_that_comes_after_the_end_is_cancelled_and_nobody_waits_for_it_for_ever():
    worker = Worker(1)
    worker.submit(int).result()
    worker.close()
    with pytest.raises(CancelledError):
        worker.submit(int).result()


def test_the_end_cancels_what_waits_without_holding_the_queue():
    worker = Worker(1)
    with worker.held():
        task = worker.submit(int)
        free = []
        task.future.add_done_callback(lambda _: free.append(_is_free(worker)))
        worker.close()
    assert free == [True]


def _is_free(worker):
    """Whether another thread could submit now."""
    done = threading.Event()

    def submit():
        worker.submit(int)
        done.set()

    threading.Thread(target=submit, daemon=True).start()
    return done.wait(20)


def test_a_callback_that_was_called_once_keeps_nothing():
    kept = []
    once = Once(kept.append)
    future = Future()
    future.add_done_callback(once)
    future.set_result(1)
    once(future)
    assert kept == [future]
    assert once._work is None
