"""Sides of a race, each in a process of its own, taking turns: while one runs a step, the others wait."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from gate import Finished, Step, output_to
from workload import Work, make_models

SIDES = {"ours": "ours", "trl": "peer_grpo", "trl-ppo": "peer_ppo", "floor": "bare.step"}
NEEDS = {
    "ours": ("lit-rlhf", "pip install -e ."),
    "trl": ("trl", 'pip install -e ".[bench]"'),
    "trl-ppo": ("trl", 'pip install -e . "trl==1.12.0" (the last version with PPO) in an environment of its own'),
    "floor": ("transformers", "pip install -e ."),
}


@dataclass
class Lane:
    """What one side did.

    Args:
        side: Key of ``SIDES``.
        settings: What it ran with.
        empty_bytes: Memory held by interpreter and libraries, before any model.
        steps: Of the rounds that count; the first step, a warm-up, is left out.
        version: Of the library.
    """

    side: str
    settings: dict[str, Any]
    empty_bytes: int
    steps: list[Step] = field(default_factory=list)
    version: str = ""

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return median(step.seconds for step in self.steps)

    @property
    def cpu_seconds(self) -> float:
        """Median processor seconds of a step, all threads together."""
        return median(step.cpu_seconds for step in self.steps)

    @property
    def spread(self) -> float:
        """Slowest step over the fastest, less one."""
        times = [step.seconds for step in self.steps]
        return max(times) / min(times) - 1

    @property
    def peak_bytes(self) -> int:
        """Most memory held, interpreter and libraries included."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def tokens(self) -> dict[str, int]:
        """Of one step."""
        return self.steps[0].tokens

    def phase(self, *names: str) -> float:
        """Median seconds of these phases together."""
        return median(sum(step.phases.get(name, 0.0) for name in names) for step in self.steps)

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        summary = {name: getattr(self, name) for name in ("seconds", "cpu_seconds", "spread", "peak_bytes")}
        return {**asdict(self), **summary}


def race(work: Work, sides: dict[str, dict[str, Any]], rounds: int, threads: int) -> dict[str, Lane]:
    """Let sides take turns at the same work.

    Args:
        work: What a step is.
        sides: Options of each side's ``run``, by its key in ``SIDES``.
        rounds: Steps of each side that count.
        threads: Of each side.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    context = multiprocessing.get_context("spawn")
    lanes: dict[str, Lane] = {}
    connections: dict[str, Connection] = {}
    logs: dict[str, Path] = {}
    processes = []
    folder = tempfile.mkdtemp()
    try:
        elsewhere(_make_models, work)  # a side that made them would start with their memory
        for name, options in sides.items():
            here, there = context.Pipe()
            log = Path(folder) / f"{len(connections)}.log"
            arguments = name, there, work, threads, options, str(log)
            process = context.Process(target=work_at, args=arguments, daemon=True)
            process.start()
            there.close()
            processes.append(process)
            connections[name], logs[name] = here, log
            hello = receive(here, name, log)
            lanes[name] = Lane(name, hello["settings"], hello["empty_bytes"], version=_version(name))
        for turn in range(rounds + 1):
            for name, connection in connections.items():
                connection.send("go")
                step = receive(connection, name, logs[name])
                if turn > 0:
                    lanes[name].steps.append(step)
        for connection in connections.values():
            connection.send("stop")
        for process in processes:
            process.join(timeout=60)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        shutil.rmtree(folder, ignore_errors=True)
    return lanes


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, computed in a process of its own that leaves nothing behind in this one."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(function, arguments)
        pool.close()
        pool.join()
    return result


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = ("torch", "transformers", "lightning")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def require(side: str) -> None:
    """Leave with one line where a side's library is missing or of the wrong version."""
    package, install = NEEDS[side]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{package} is not installed here: {install}") from None
    if side == "trl-ppo" and not version.startswith("1.12"):
        raise SystemExit(f"trl {version} has no PPO any more: {install}")


def _make_models(work: Work) -> None:
    with output_to(os.devnull):
        make_models(work)


def work_at(side: str, connection: Any, work: Work, threads: int, options: dict[str, Any], log: str) -> None:
    """In the worker: what its library prints goes to a file, which is shown if it fails.

    Args:
        side: Key of ``SIDES``.
        connection: To the process that started this one.
        work: What a step is.
        threads: Of torch.
        options: Of the side's ``run``.
        log: The file.
    """
    with output_to(log), contextlib.suppress(Finished):
        try:
            importlib.import_module(SIDES[side]).run(connection, work, threads, **options)
        except Exception:
            traceback.print_exc()


def receive(connection: Connection, name: str, log: Path) -> Any:
    """A worker's next message, or its last words where there is none."""
    try:
        return connection.recv()
    except EOFError:
        last = log.read_text().splitlines()[-30:]
        raise SystemExit("\n".join([*last, f"{name} stopped with the error above"])) from None


def _version(name: str) -> str:
    return importlib.metadata.version(NEEDS[name][0])


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
