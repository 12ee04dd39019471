from __future__ import annotations

import os
import threading
import time

import psutil
import pytest

from lit_rlhf.rewards.isolation import (
    IsolatedWorker,
    WorkerCallError,
    WorkerCrashError,
    WorkerPool,
    WorkerStartError,
    WorkerTimeoutError,
)


@pytest.fixture
def worker():
    worker = IsolatedWorker(memory_bytes=1 << 30)
    yield worker
    worker.close()


def test_runs_elsewhere_and_keeps_the_process(worker: IsolatedWorker) -> None:
    first = worker.run(os.getpid, timeout_seconds=10)
    assert first != os.getpid()
    assert worker.run(os.getpid, timeout_seconds=10) == first == worker.pid


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_timeout_kills_and_the_next_call_restarts(worker: IsolatedWorker, in_thread: bool) -> None:
    worker.start()
    child = worker.pid
    caught: list[Exception] = []

    def call() -> None:
        try:
            worker.run(time.sleep, 60, timeout_seconds=0.5)
        except WorkerTimeoutError as error:
            caught.append(error)

    start = time.perf_counter()
    if in_thread:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    else:
        call()
    assert caught
    assert time.perf_counter() - start < 5
    assert worker.pid is None
    assert not psutil.pid_exists(child)  # type: ignore[arg-type]
    assert worker.run(abs, -3, timeout_seconds=10) == 3


def test_work_in_one_long_c_call_is_killed_too(worker: IsolatedWorker) -> None:
    worker.start()
    with pytest.raises(WorkerTimeoutError):
        worker.run(pow, 5, 5**15, timeout_seconds=0.5)


def test_exception_crash_memory_and_output(worker: IsolatedWorker) -> None:
    with pytest.raises(WorkerCallError, match=r"ValueError.*nope"):
        worker.run(int, "nope", timeout_seconds=10)
    with pytest.raises(WorkerCrashError):
        worker.run(os._exit, 3, timeout_seconds=10)
    with pytest.raises((WorkerCallError, WorkerCrashError)):
        worker.run(bytes, 8 << 30, timeout_seconds=20)
    assert worker.run(print, "not part of the protocol", timeout_seconds=10) is None
    assert worker.run(abs, -3, timeout_seconds=10) == 3


def test_initializer_that_fails() -> None:
    with pytest.raises(WorkerStartError, match="could not be started"):
        IsolatedWorker(initializer=os.abort).start()


def test_pool_bounds_and_closes() -> None:
    pool = WorkerPool(2)
    pids = set()

    def call() -> None:
        with pool.worker() as worker:
            pids.add(worker.run(os.getpid, timeout_seconds=10))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(pids) <= 2
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_use_the_childs_pipe(worker: IsolatedWorker) -> None:
    mine = worker.run(os.getpid, timeout_seconds=10)
    reader, writer = os.pipe()
    fork = os.fork()
    if fork == 0:
        other = worker.run(os.getpid, timeout_seconds=10)
        worker.close()
        os.write(writer, str(other).encode())
        os._exit(0)
    os.waitpid(fork, 0)
    assert int(os.read(reader, 20)) != mine
    assert worker.run(os.getpid, timeout_seconds=10) == mine
