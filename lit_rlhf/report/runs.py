"""A run as its folder tells it: metrics, alarms, completions, configuration."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lit_rlhf.callbacks.health.report import FILE_NAME as HEALTH_NAME
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.report.logs import Log, RunLogs, natural_key, read_logs

_LOGGED = "metrics.csv (CSVLogger) or events.out.tfevents.* (TensorBoardLogger)"


@dataclass(frozen=True)
class Series:
    """A metric over a run.

    Args:
        metric: Its name.
        steps: Optimizer steps, ascending.
        values: One per step.
        file: Where the last value stands.
    """

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    file: Path

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]


@dataclass(frozen=True)
class RungAlarm:
    """An alarm of ``health.jsonl``.

    Args:
        rule: Its name.
        level: ``warning`` or ``info``.
        iteration: From 0.
        step: Optimizer steps done.
        finding: What was seen.
        advice: What to change.
    """

    rule: str
    level: str
    iteration: int
    step: int
    finding: str
    advice: str


@dataclass(frozen=True)
class EvaluationFile:
    """Results prompt by prompt.

    Args:
        stage: ``validate``, ``test`` or how the writer calls it.
        step: Optimizer steps done.
        dataset: Name of the set of prompts; empty where there is one.
        file: JSON lines.
    """

    stage: str
    step: int
    dataset: str
    file: Path


@dataclass(frozen=True, eq=False)
class Run:
    """What a run folder holds.

    Args:
        folder: Of the run.
        series: By metric.
        alarms: In the order in which they rang.
        samples: Files of completions by iteration, one per rank.
        evaluations: Files of per-prompt results, by step.
        config: The resolved recipe, empty where there is none.
    """

    folder: Path
    series: Mapping[str, Series]
    alarms: tuple[RungAlarm, ...] = ()
    samples: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)
    evaluations: tuple[EvaluationFile, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def iteration_steps(self) -> tuple[int, ...]:
        """Optimizer steps done at the end of each iteration."""
        for name in ("tokens/generated", "reward"):
            if name in self.series:
                return self.series[name].steps
        return ()

    def last(self, metric: str) -> float | None:
        """The newest value of a metric; ``None`` if it was not logged.

        Args:
            metric: Its name.
        """
        series = self.series.get(metric)
        return None if series is None else series.last

    def tokens_at(self, step: int) -> float:
        """Completion tokens generated when so many optimizer steps were done.

        Args:
            step: Between two iterations it counts with the earlier one.
        """
        return _at(self.series.get("tokens/generated"), step)

    def seconds_at(self, step: int) -> float:
        """Seconds of generation, rewards, reference and training until then; evaluations are not in it.

        Args:
            step: As for :meth:`tokens_at`.
        """
        return _at(self._seconds, step)

    @cached_property
    def _seconds(self) -> Series | None:
        series = self.series.get("time/iteration")
        if series is None:
            return None
        total, sums = 0.0, []
        for value in series.values:
            total += value
            sums.append(total)
        return Series("time/iteration", series.steps, tuple(sums), series.file)

    def option(self, path: str) -> Any:
        """A value of the recipe, ``None`` if it is not known.

        Args:
            path: Such as ``data.init_args.group_size``.
        """
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def algorithm(self) -> str:
        """Name of the module's class, or what the metrics betray of it."""
        name = self.option("model.class_path")
        if isinstance(name, str):
            return name.rpartition(".")[2].removesuffix("Module")
        return "PPO" if self.has_critic else "GRPO" if "group/effective_ratio" in self.series else "unknown algorithm"

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic instead of a group."""
        return "value/error" in self.series or "value/loss" in self.series

    @property
    def group_size(self) -> int | None:
        """Completions per prompt, where the recipe is known."""
        value = self.option("data.init_args.group_size")
        return value if isinstance(value, int) else None

    @property
    def seed(self) -> int | None:
        """The recipe's."""
        value = self.config.get("seed_everything")
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_run(folder: str | Path) -> Run:
    """Read what is there, also while it is being written.

    Args:
        folder: What ``lit-rlhf fit`` or a Trainer with loggers left.

    Raises:
        ConfigurationError: There is no such folder, or nothing was logged in it.
        DataError: Its logs are those of several runs, or cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: {'this is a file' if folder.exists() else 'there is no such folder'}")
    found = read_logs(folder)
    logs = [log for log in found.logs if log.rows]
    if not logs:
        raise ConfigurationError(
            f"{folder}: no run has logged here; a report is made of {_LOGGED} in or below a folder"
        )
    series = _joined(logs)
    return Run(
        folder,
        series,
        alarms=tuple(_alarms(folder, found)),
        samples=_samples(folder, found),
        evaluations=tuple(_evaluations(folder, found)),
        config=_config(folder, logs),
    )


def read_json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file; lines that are not finished or not JSON are passed over.

    Args:
        file: JSON lines.
    """
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _joined(logs: Iterable[Log]) -> dict[str, Series]:
    """One series per metric; where two logs have a step, the later one wins."""
    points: dict[str, dict[int, float]] = {}
    files: dict[str, Path] = {}
    for log in logs:
        for step, row in log.rows.items():
            for name, value in row.items():
                points.setdefault(name, {})[step] = value
                files[name] = log.file
    ordered = {name: sorted(values.items()) for name, values in sorted(points.items())}
    return {
        name: Series(name, tuple(step for step, _ in pairs), tuple(value for _, value in pairs), files[name])
        for name, pairs in ordered.items()
    }


def _at(series: Series | None, step: int) -> float:
    if series is None:
        return 0.0
    place = bisect_right(series.steps, step)
    return series.values[place - 1] if place else 0.0


def _newest_first(files: Iterable[Path], folder: Path) -> list[Path]:
    return sorted(files, key=lambda file: natural_key(file.relative_to(folder)), reverse=True)


def _alarms(folder: Path, logs: RunLogs) -> list[RungAlarm]:
    alarms: dict[tuple[int, str, str], RungAlarm] = {}
    for file in _newest_first(folder.rglob(HEALTH_NAME), folder):
        for line in read_json_lines(file):
            if line.get("event") == "alarm" and line.get("step", 0) < logs.end_of(file, folder):
                alarm = RungAlarm(**{name: line.get(name, "") for name in RungAlarm.__dataclass_fields__})
                alarms.setdefault((int(alarm.iteration or 0), alarm.rule, alarm.level), alarm)
    return [alarms[key] for key in sorted(alarms)]


def _samples(folder: Path, logs: RunLogs) -> dict[int, tuple[Path, ...]]:
    """By iteration the newest version's files."""
    files: dict[int, tuple[Path, ...]] = {}
    for file in _newest_first(folder.rglob("samples/iteration-*.jsonl"), folder):
        digits = file.stem.split("-")[1]
        known = files.get(int(digits), ()) if digits.isdigit() and logs.end_of(file, folder) > 0 else None
        if known is not None and (not known or known[0].parent == file.parent):
            files[int(digits)] = tuple(sorted((*known, file)))
    return dict(sorted(files.items()))


def _evaluations(folder: Path, logs: RunLogs) -> list[EvaluationFile]:
    """Per stage, step and set the newest file."""
    found: dict[tuple[int, str, str], EvaluationFile] = {}
    for file in _newest_first(folder.rglob("evaluation/*.jsonl"), folder):
        stage, _, rest = file.stem.partition("-")
        digits, _, dataset = rest.partition("-")
        if digits.isdigit() and int(digits) < logs.end_of(file, folder):
            found.setdefault((int(digits), stage, dataset), EvaluationFile(stage, int(digits), dataset, file))
    return [found[key] for key in sorted(found)]


def _config(folder: Path, logs: list[Log]) -> dict[str, Any]:
    beside = [log.folder / "config.yaml" for log in reversed(logs)]
    for file in [*beside, *_newest_first(folder.rglob("config.yaml"), folder)]:
        if file.is_file():
            try:
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError):
                continue
            if isinstance(content, dict) and "model" in content:
                return content
    return {}
