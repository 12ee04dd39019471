"""Run a function in a separate process that can be killed: a wall-clock and a memory limit that always hold.

A thread cannot be stopped from outside and ``signal.alarm`` only works in the main thread, so code that may never
return (a tower of powers in a computer algebra system) runs in a child process. The child is started on first use, kept
for the next call, and killed and replaced when a call exceeds its limit.

The child is a fresh interpreter, not a fork and not ``multiprocessing``'s "spawn": it does not import the user's main
script again, and holds neither CUDA state nor locks of the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from lit_rlhf.errors import RewardError

_HEADER = struct.Struct("!Q")
_STARTUP_SECONDS = 120.0


class WorkerTimeoutError(RewardError):
    """The call did not end within its limit; the process that ran it was killed."""


class WorkerCrashError(RewardError):
    """The process ended without an answer (out of memory, a crash, ``os._exit``)."""


class WorkerStartError(RewardError):
    """The process could not be started, or its initializer raised."""


class WorkerCallError(RewardError):
    """The function raised. The message holds the exception's type and text."""


def _write(stream: BinaryIO, payload: Any) -> None:
    data = pickle.dumps(payload)
    stream.write(_HEADER.pack(len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    (size,) = _HEADER.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def _serve() -> None:
    """Body of the child: answer calls from stdin until it closes."""
    # The pipe is kept under a number of its own, so that a print in the called code cannot break the protocol.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        memory_bytes, initializer = _read(requests)
        _limit_memory(memory_bytes)
        try:
            if initializer is not None:
                initializer()
        except BaseException as error:
            _write(replies, (False, f"{type(error).__name__}: {error}"))
            return
        _write(replies, (True, None))
        while True:
            seconds, function, args = _read(requests)
            _self_destruct(seconds + 2.0)
            try:
                reply = (True, function(*args))
            except Exception as error:
                reply = (False, f"{type(error).__name__}: {str(error)[:500]}")
            _self_destruct(0.0)
            _write(replies, reply)


def _limit_memory(memory_bytes: int | None) -> None:
    if memory_bytes is None or importlib.util.find_spec("resource") is None:
        return  # Windows: the time limit alone has to do
    resource = importlib.import_module("resource")
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _self_destruct(seconds: float) -> None:
    """Let the system end this process after ``seconds`` (0 disarms): the parent may have been killed meanwhile."""
    import signal

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


class IsolatedWorker:
    """One child process that runs picklable functions, one at a time.

    Args:
        initializer: Function without arguments that the child runs once after its start, for slow imports. Its time
            is not counted against the limit of a call.
        memory_bytes: Limit of the child's address space, in bytes; ``None`` for none. Without effect on Windows.
    """

    def __init__(self, initializer: Callable[[], object] | None = None, memory_bytes: int | None = 2 << 30) -> None:
        self._initializer = initializer
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: queue.Queue[Any] = queue.Queue()
        self._owner = 0

    @property
    def pid(self) -> int | None:
        """Process id of the child, ``None`` where none runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float) -> Any:
        """Return ``function(*args)``, run in the child.

        Args:
            function: A function that pickle finds by its module and name.
            *args: Picklable arguments.
            timeout_seconds: Wall-clock limit, in seconds. The child is killed when it is exceeded.

        Raises:
            WorkerTimeoutError: The limit was exceeded.
            WorkerCrashError: The child ended without an answer.
            WorkerStartError: The child could not be started.
            WorkerCallError: The function raised.
        """
        with self._lock:
            self._ensure_started()
            try:
                self._send((timeout_seconds, function, args))
                return self._receive(timeout_seconds)
            except WorkerCallError:
                raise
            except BaseException:
                self._kill()
                raise

    def start(self) -> None:
        """Start the child now, where none runs: its start is then not part of anybody's limit."""
        with self._lock:
            self._ensure_started()

    def _ensure_started(self) -> None:
        if self._owner != os.getpid():
            self._process = None  # a fork of the process that owns the child must not talk to it
        if self.pid is None:
            self._kill()  # one that ended by itself is cleared away
            self._start()

    def close(self) -> None:
        """Kill the child. The next call starts another."""
        self._kill()

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import _serve; _serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._process, self._replies, self._owner = process, queue.Queue(), os.getpid()
        threading.Thread(target=_forward, args=(process, self._replies), daemon=True).start()
        try:
            self._send((self._memory_bytes, self._initializer))
            self._receive(_STARTUP_SECONDS)
        except RewardError as error:
            self._kill()
            raise WorkerStartError(f"The worker process could not be started: {error}") from error
        except BaseException:
            self._kill()
            raise

    def _send(self, payload: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            _write(self._process.stdin, payload)  # type: ignore[arg-type]
        except OSError as error:
            raise WorkerCrashError("The worker process ended before it was given its work.") from error

    def _receive(self, seconds: float) -> Any:
        try:
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            raise WorkerTimeoutError(f"No answer within {seconds:g} seconds; the worker process was killed.") from None
        if reply is None:
            raise WorkerCrashError("The worker process ended without an answer.")
        succeeded, value = reply
        if not succeeded:
            raise WorkerCallError(value)
        return value

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _forward(process: subprocess.Popen[bytes], replies: queue.Queue[Any]) -> None:
    """Move the child's answers into a queue, whose ``get`` can wait with a limit on every system."""
    try:
        while True:
            replies.put(_read(process.stdout))  # type: ignore[arg-type]
    except Exception:
        replies.put(None)


class WorkerPool:
    """Up to ``size`` workers, started as they are needed; ended with the interpreter.

    Args:
        size: Largest number of child processes.
        initializer: See :class:`IsolatedWorker`.
        memory_bytes: Limit of each child, in bytes.
    """

    def __init__(
        self, size: int, initializer: Callable[[], object] | None = None, memory_bytes: int | None = 2 << 30
    ) -> None:
        self.workers = [IsolatedWorker(initializer, memory_bytes) for _ in range(size)]
        # Last in, first out: the worker that is already warm is taken before another is started.
        self._idle: queue.LifoQueue[IsolatedWorker] = queue.LifoQueue()
        for worker in self.workers:
            self._idle.put(worker)
        atexit.register(self.close)

    @contextlib.contextmanager
    def worker(self) -> Iterator[IsolatedWorker]:
        """The next idle worker, for the length of a ``with`` block; waits where all are taken."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all children."""
        for worker in self.workers:
            worker.close()
