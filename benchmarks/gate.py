"""The worker's half of a race: one step at a time, timed in phases, and idle in between."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass
class Step:
    """What one step cost.

    Args:
        seconds: On the clock.
        cpu_seconds: Of this process, all threads together.
        phases: Seconds by phase; ``rest`` is what no phase claims.
        cpu_phases: The same in processor seconds.
        tokens: By kind.
        peak_bytes: Most memory that the process has held so far.
        resident_bytes: Memory that it holds at the end of the step.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    cpu_phases: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    resident_bytes: int = 0


Clocks = tuple[float, float]


def clocks() -> Clocks:
    """Seconds on the clock and processor seconds of this process, to be subtracted from later ones."""
    return time.perf_counter(), time.process_time()


class Finished(BaseException):
    """Raised in the worker when no further step is wanted; not an ``Exception``, so no trainer swallows it."""


class Alone:
    """Takes the place of a connection where a side runs in this process, with nobody to take turns with.

    Args:
        steps: That count; a warm-up step comes before them.
    """

    def __init__(self, steps: int) -> None:
        self.left = steps + 1
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        """Keep it."""
        self.sent.append(message)

    def recv(self) -> str:
        """Go on, so many times."""
        self.left -= 1
        return "go" if self.left >= 0 else "stop"

    @property
    def hello(self) -> dict[str, Any]:
        """What a gate says first."""
        return self.sent[0]

    @property
    def steps(self) -> list[Step]:
        """Those that count."""
        return self.sent[2:]


class Gate:
    """Where a worker waits until it may run its next step. Made once the libraries are there, and before any model.

    Args:
        connection: To the process that alternates the workers.
        settings: What this side runs with, for the report.
    """

    def __init__(self, connection: Connection | Alone, settings: dict[str, Any]) -> None:
        self.connection = connection
        self.settings = settings
        self.empty_bytes = resident_bytes()
        self.step: Step | None = None
        self._started: Clocks = (0.0, 0.0)

    def open(self) -> None:
        """End the step that was running, report it, and wait for the word to start the next.

        To be called where one step ends and the next begins, so that nothing falls between two of them.

        Raises:
            Finished: No further step is wanted.
        """
        if self.step is None:
            self.connection.send({"settings": self.settings, "empty_bytes": self.empty_bytes})
        else:
            step = self.step
            step.seconds, step.cpu_seconds = (now - then for now, then in zip(clocks(), self._started, strict=True))
            step.phases["rest"] = step.seconds - sum(step.phases.values())
            step.cpu_phases["rest"] = step.cpu_seconds - sum(step.cpu_phases.values())
            step.peak_bytes, step.resident_bytes = peak_bytes(), resident_bytes()
            self.connection.send(step)
        if self.connection.recv() != "go":
            raise Finished
        self.step = Step()
        self._started = clocks()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds inside the block to a phase of the step."""
        started = clocks()
        yield
        self.add(name, started)

    def add(self, name: str, started: Clocks) -> None:
        """Add to a phase what has passed since these clocks."""
        if self.step is None:
            return
        kept = self.step.phases, self.step.cpu_phases
        for phases, now, then in zip(kept, clocks(), started, strict=True):
            phases[name] = phases.get(name, 0.0) + now - then

    def count(self, **tokens: int) -> None:
        """Add to the step's tokens."""
        if self.step is not None:
            for kind, number in tokens.items():
                self.step.tokens[kind] = self.step.tokens.get(kind, 0) + number

    def timed(self, name: str | Callable[[], str], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its seconds added to a phase; the phase's name may depend on when it is called."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name()):
                return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def output_to(path: str | Path) -> Iterator[None]:
    """Send what is printed inside the block, by C code too, to a file: libraries talk a lot while they load."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        with open(path, "w") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in zip((1, 2), kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_bytes() -> int:
    """Most memory that this process has held."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        # Not getrusage: its maximum survives exec, so a child would start with its parent's.
        for line in status:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
