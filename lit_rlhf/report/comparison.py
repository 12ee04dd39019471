"""What a report is about: arms, each with its runs; of a single run, one arm with one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_rlhf.errors import ConfigurationError, DataError, LitRLHFError
from lit_rlhf.report.runs import Run, read_run

COMPARISON_NAME = "comparison.json"
STATUSES = ("done", "failed", "running", "pending")


@dataclass(frozen=True, eq=False)
class ArmRun:
    """One seed of an arm.

    Args:
        seed: Its number; ``None`` where it is not known.
        status: One of :data:`STATUSES`; empty for a single run, whose end nobody noted.
        error: Why it failed.
        run: What it left; ``None`` where there is nothing yet.
    """

    seed: int | None
    status: str
    error: str | None
    run: Run | None


@dataclass(frozen=True, eq=False)
class Arm:
    """One of the things that are compared.

    Args:
        name: Short, as in file names.
        title: As it is shown.
        runs: By seed.
    """

    name: str
    title: str
    runs: tuple[ArmRun, ...]

    @cached_property
    def counted(self) -> tuple[ArmRun, ...]:
        """The runs that the numbers are made of: those that are done; as long as there are none, those that run."""
        with_data = [run for run in self.runs if run.run is not None and run.run.iteration_steps]
        for statuses in (("done", ""), ("running",)):
            chosen = tuple(run for run in with_data if run.status in statuses)
            if chosen:
                return chosen
        return ()

    @property
    def is_unfinished(self) -> bool:
        """Whether its numbers are those of runs that go on."""
        return any(run.status == "running" for run in self.counted)

    @property
    def has_critic(self) -> bool:
        """Whether its advantages come from a critic."""
        return any(run.run.has_critic for run in self.counted if run.run is not None)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything that a report is made of.

    Args:
        folder: Where it was read.
        arms: In their order.
        token_budget: Completion tokens that each run was given.
        is_single: The folder is a run's.
    """

    folder: Path
    arms: tuple[Arm, ...]
    token_budget: int | None = None
    is_single: bool = False


def read_folder(folder: str | Path) -> Comparison:
    """A comparison, or a run as a comparison of one.

    Args:
        folder: With a ``comparison.json``, or of a run.

    Raises:
        ConfigurationError: It is neither.
        DataError: ``comparison.json`` cannot be used, or logs cannot be read.
    """
    folder = Path(folder)
    file = folder / COMPARISON_NAME
    if file.is_file():
        return _comparison(folder, file)
    run = read_run(folder)
    name = folder.resolve().name
    return Comparison(folder, (Arm(name, run.algorithm, (ArmRun(run.seed, "", None, run),)),), is_single=True)


def _comparison(folder: Path, file: Path) -> Comparison:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        arms = tuple(_arm(folder, arm) for arm in content["arms"])
        budget = content.get("token_budget")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{file} is no list of arms and their runs as `lit-rlhf compare` writes it ({reason})"
        ) from error
    if not arms:
        raise DataError(f"{file} has no arms")
    return Comparison(folder, arms, budget)


def _arm(folder: Path, content: Mapping[str, Any]) -> Arm:
    name = str(content["name"])
    runs = tuple(_arm_run(folder, run) for run in content["runs"])
    return Arm(name, str(content.get("title") or name), runs)


def _arm_run(folder: Path, content: Mapping[str, Any]) -> ArmRun:
    status, error = str(content["status"]), content.get("error")
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")
    run = None
    if status != "pending":
        try:
            run = read_run(folder / content["folder"])
        except ConfigurationError as reason:  # nothing logged yet
            error = error or (str(reason) if status == "done" else None)
        except LitRLHFError as reason:
            error = error or str(reason)
    return ArmRun(content["seed"], status, error, run)
