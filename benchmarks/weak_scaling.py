"""Twice the work on two processes against once the work on one: it should take as long.

    python benchmarks/weak_scaling.py --work small-spread

Each process has a core to itself. Three ways take turns: one process alone; two that know nothing of each other, which
costs what the cores share, memory above all; and two ranks of DDP over gloo, which also wait for each other and sum
gradients. Each process does the same work in all of them, the same prompts with completions of the same lengths.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

from gate import Step
from options import chosen_works
from race import elsewhere, receive, require, work_at
from report import PHASES, describe, save, table
from workload import WORKS, Work, make_models

NEEDED = 0.9
RANKS = 2


@dataclass
class Worker:
    """A process on a core of its own.

    Args:
        core: Its number.
        connection: To it.
        process: Itself.
        log: What it prints.
    """

    core: int
    connection: Connection
    process: BaseProcess
    log: Path

    def receive(self) -> Any:
        """Its next message."""
        return receive(self.connection, f"the process on core {self.core}", self.log)


@dataclass
class Way:
    """Workers that run at once.

    Args:
        workers: One or two.
        steps: A list per round, with a step of each worker.
    """

    workers: list[Worker]
    steps: list[list[Step]] = field(default_factory=list)

    def run(self) -> list[Step]:
        """One step of each."""
        for worker in self.workers:
            worker.connection.send("go")
        return [worker.receive() for worker in self.workers]

    def seconds(self) -> list[float]:
        """Of each round: those of its slowest worker."""
        return [max(step.seconds for step in steps) for steps in self.steps]

    def cpu_seconds(self) -> float:
        """Median processor seconds of a step."""
        return median(step.cpu_seconds for steps in self.steps for step in steps)

    def phase(self, parts: Sequence[str]) -> float:
        """Median seconds of a phase; of what a worker waits for, its seconds count."""
        return median(sum(step.phases.get(part, 0.0) for part in parts) for steps in self.steps for step in steps)


def start(work: Work, core: int, ranks: int, rank: int, port: int, folder: Path) -> Worker:
    """Start a worker and wait until it has loaded everything but its model."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    log = folder / f"{ranks}-{rank}.log"
    arguments = core, ranks, rank, port, there, work, str(log)
    process = context.Process(target=_pinned, args=arguments, daemon=True)
    process.start()
    there.close()
    return Worker(core, here, process, log)


def _pinned(core: int, ranks: int, rank: int, port: int, connection: Connection, work: Work, log: str) -> None:
    os.sched_setaffinity(0, {core})
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    work_at("ours", connection, work, 1, {"ranks": ranks}, log)


def measure(work: Work, cores: Sequence[int], rounds: int) -> dict[str, Way]:
    """Run the three ways in turn.

    Args:
        work: Of each process.
        cores: Two.
        rounds: That count; one comes before them.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    elsewhere(make_models, work)
    folder, port = Path(tempfile.mkdtemp()), _free_port()
    workers: list[Worker] = []
    try:
        for ranks in (1, RANKS):
            workers += [start(work, core, ranks, rank, port, folder) for rank, core in enumerate(cores)]
        for worker in workers:
            worker.receive()  # its settings
        apart, together = workers[:RANKS], workers[RANKS:]
        ways = {"alone": Way(apart[:1]), "two apart": Way(apart), "two ranks": Way(together)}
        for turn in range(rounds + 1):
            for way in ways.values():
                steps = way.run()
                if turn > 0:
                    way.steps.append(steps)
        for worker in workers:
            worker.connection.send("stop")
        for worker in workers:
            worker.process.join(timeout=60)
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.terminate()
        shutil.rmtree(folder, ignore_errors=True)
    return ways


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lines(ways: dict[str, Way]) -> Iterator[list[str]]:
    """Rows of the table: raw seconds, phases, and what share of the ideal each way reaches."""
    yield ["", *ways]
    for phase, parts in PHASES.items():
        yield [f"{phase}, s", *(f"{way.phase(parts):.2f}" for way in ways.values())]
    yield ["whole step, s", *(f"{median(way.seconds()):.2f}" for way in ways.values())]
    yield ["processor, s", *(f"{way.cpu_seconds():.2f}" for way in ways.values())]
    yield ["fastest step, s", *(f"{min(way.seconds()):.2f}" for way in ways.values())]
    yield ["of the ideal", *(f"{share(ways, name):.3f}" for name in ways)]
    fastest = min(ways["alone"].seconds())
    yield ["of the ideal, fastest steps", *(f"{fastest / min(way.seconds()):.3f}" for way in ways.values())]


def share(ways: dict[str, Way], name: str) -> float:
    """The seconds of one process alone over those of this way."""
    return median(ways["alone"].seconds()) / median(ways[name].seconds())


def record(work: Work, ways: dict[str, Way]) -> dict[str, Any]:
    """For a JSON file."""
    return {
        name: {
            "share": share(ways, name),
            "seconds": way.seconds(),
            "phases": {phase: way.phase(parts) for phase, parts in PHASES.items()},
        }
        for name, way in ways.items()
    }


def main() -> None:
    """Measure, print, save; fail below the share that is needed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--work", default="tiny-spread", help=f"any of {', '.join(WORKS)}; several with commas")
    options.add_argument("--rounds", type=int, default=5, help="measured steps of each way (default 5)")
    options.add_argument("--quick", action="store_true", help="a smaller model and shorter texts: half a minute")
    arguments = options.parse_args()
    require("ours")
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    if len(cores) < RANKS:
        raise SystemExit(f"{RANKS} cores are needed, this process may use {len(cores)}")
    rounds = 2 if arguments.quick else arguments.rounds
    missed = []
    found: dict[str, Any] = {}
    for name, work in chosen_works(arguments.work, arguments.quick).items():
        ways = measure(work, cores, rounds)
        print(describe(name, work, 1), f"on each of cores {cores[0]} and {cores[1]}")
        for label, way in ways.items():
            print(f"{label}: seconds by step: {' '.join(f'{seconds:.2f}' for seconds in way.seconds())}")
        print(table(list(lines(ways))), end="\n\n")
        reached = share(ways, "two ranks")
        print(f"weak scaling of {name}: {reached:.3f} of the ideal, {NEEDED} needed", flush=True)
        found[name] = record(work, ways)
        if reached < NEEDED:
            missed.append(name)
    save("weak-scaling-quick" if arguments.quick else "weak-scaling", found)
    if missed and not arguments.quick:
        raise SystemExit(f"too slow: {', '.join(missed)}")


if __name__ == "__main__":
    main()
