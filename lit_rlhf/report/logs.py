"""Metrics from what loggers leave: CSV files and TensorBoard's events, of a run and of those that resumed it."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_rlhf.errors import DataError, reason_of

CSV_NAME = "metrics.csv"
_EVENTS = "events.out.tfevents.*"
_NO_METRICS = ("step", "epoch", "hp_metric")
Rows = dict[int, dict[str, float]]
"""Metrics by optimizer step."""


@dataclass(frozen=True)
class Log:
    """The metrics of one start of a run.

    Args:
        folder: The version's.
        file: What was read.
        rows: Metrics by optimizer step, ascending.
    """

    folder: Path
    file: Path
    rows: Rows

    @property
    def first_training_step(self) -> int | None:
        """Where training went on, or began; ``None`` of a log with evaluations only."""
        return next((step for step, row in self.rows.items() if "tokens/generated" in row or "reward" in row), None)

    @property
    def last_step(self) -> int:
        """Of the last row, -1 without rows."""
        return next(reversed(self.rows), -1)


@dataclass(frozen=True)
class RunLogs:
    """The logs of a run.

    Args:
        logs: Of the kind of logger that has got further; oldest first.
        ends: For each version folder of any kind the step from which on what it says is no longer so, because the run
            was resumed or begun anew before it.
    """

    logs: tuple[Log, ...]
    ends: dict[Path, float]

    def end_of(self, place: Path, inside: Path) -> float:
        """Until which step a file is part of the run.

        Args:
            place: The file.
            inside: The run's folder.
        """
        for folder in place.parents:
            if folder in self.ends:
                return self.ends[folder]
            if folder == inside:
                break
        return math.inf


def read_logs(folder: Path) -> RunLogs:
    """The logs of a run.

    Args:
        folder: Of the run.

    Returns:
        Only what belongs to the newest run: one that was begun anew in the same folder takes the place of those before,
        one that was resumed goes on from them, and what they had after that point is gone.

    Raises:
        DataError: The folder has the logs of several runs.
    """
    chains: list[tuple[Log, ...]] = []
    ends: dict[Path, float] = {}
    for pattern in (CSV_NAME, _EVENTS):
        versions = _versions(folder, folder.rglob(pattern))
        chain = _chain([(place, files[-1]) for place, files in versions])
        chains.append(tuple(chain))
        ends.update({place: 0 for place, _ in versions if place not in ends})
        end = math.inf
        for log in reversed(chain):
            ends[log.folder] = end
            end = end if log.first_training_step is None else log.first_training_step
    return RunLogs(max(chains, key=lambda logs: logs[-1].last_step if logs else -2), ends)


def read_log(folder: Path, file: Path) -> Log:
    """One file of either kind; for events all in the folder.

    Args:
        folder: The version's.
        file: In it.
    """
    return Log(folder, file, dict(sorted((read_csv(file) if file.name == CSV_NAME else read_events(folder)).items())))


def read_csv(file: Path) -> Rows:
    """A ``CSVLogger``'s file; a last line that is not yet finished is left out.

    Args:
        file: ``metrics.csv``.
    """
    text = file.read_bytes().decode("utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    rows: Rows = {}
    for record in csv.DictReader(lines):
        step = _number(record.get("step"))
        if step is None:
            continue
        row = rows.setdefault(int(step), {})
        for name, cell in record.items():
            value = _number(cell)
            if value is not None and name not in _NO_METRICS:
                row[name] = value
    return rows


def read_events(folder: Path) -> Rows:
    """The scalars of TensorBoard's event files, in the order in which they were written.

    Args:
        folder: With the files.

    Raises:
        DataError: They cannot be read.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    try:
        events.Reload()
    except Exception as error:  # the library raises many kinds
        raise DataError(f"{folder}: TensorBoard's events cannot be read: {reason_of(error)}") from error
    rows: Rows = {}
    for name in events.Tags()[SCALARS]:
        if name not in _NO_METRICS:
            for event in events.Scalars(name):
                if math.isfinite(event.value):
                    rows.setdefault(event.step, {})[name] = event.value
    return rows


def natural_key(path: Path) -> list[tuple[int, str | int]]:
    """For sorting ``version_10`` behind ``version_9``.

    Args:
        path: Any.
    """
    parts = re.split(r"(\d+)", path.as_posix())
    return [(1, int(part)) if part.isdigit() else (0, part) for part in parts]


def _versions(folder: Path, files: Iterable[Path]) -> list[tuple[Path, list[Path]]]:
    """Version folders with their log files, oldest first; all of one run."""
    versions: dict[Path, list[Path]] = {}
    for file in sorted(files, key=natural_key):
        versions.setdefault(file.parent, []).append(file)
    runs = sorted({version.parent for version in versions})
    if len(runs) > 1:
        names = ", ".join(str(run.relative_to(folder)) for run in runs[:4] if run != folder.parent)
        raise DataError(f"{folder} holds the logs of {len(runs)} runs ({names}{', ...' * (len(runs) > 4)}): name one")
    return list(versions.items())


def _chain(versions: Sequence[tuple[Path, Path]]) -> list[Log]:
    """The newest log and what it goes on from, cut where it does."""
    chain: list[Log] = []
    newer: Log | None = None  # with training in it
    for folder, file in reversed(versions):
        log = read_log(folder, file)
        if newer is not None:
            start = newer.first_training_step
            assert start is not None
            log = Log(folder, file, {step: row for step, row in log.rows.items() if step < start})
            before = [row["tokens/generated"] for row in log.rows.values() if "tokens/generated" in row]
            if before and newer.rows[start].get("tokens/generated", math.inf) <= before[-1]:
                break  # the newer one was begun anew
            if log.first_training_step is None:
                continue
        chain.append(log)
        newer = log if log.first_training_step is not None else newer
    trained = [log for log in chain if log.first_training_step is not None]
    # `lit-rlhf validate` and `test` write at step 0: the one would be taken for the policy before training.
    return [log if log in trained or not trained else _tests_of(log) for log in reversed(chain)]


def _tests_of(log: Log) -> Log:
    rows = {step: {n: v for n, v in row.items() if n.startswith("test/")} for step, row in log.rows.items()}
    return Log(log.folder, log.file, rows)


def _number(cell: str | None) -> float | None:
    try:
        value = float(cell) if cell else math.nan
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
