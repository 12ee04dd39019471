"""How an alarm is told: on the console, as text in TensorBoard, as a line of ``health.jsonl``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.text import Text

from lit_rlhf.callbacks.health.rule import Level

FILE_NAME = "health.jsonl"


@dataclass(frozen=True)
class Alarm:
    """Something that went wrong, or is worth knowing, at an iteration.

    Args:
        rule: Its name.
        level: ``warning`` or ``info``.
        iteration: From 0.
        step: Optimizer steps done.
        signal: What was looked at.
        figure: Its value.
        threshold: What it is beyond.
        finding: The three in words.
        advice: What to change.
    """

    rule: str
    level: Level
    iteration: int
    step: int
    signal: str
    figure: float
    threshold: float
    finding: str
    advice: str

    def __str__(self) -> str:
        return f"{self.rule} (iteration {self.iteration}): {self.finding}. {self.advice}"


class HealthReport:
    """Writes alarms to where a user looks. Only the first rank does.

    Args:
        trainer: Asked for its log folder, which all ranks have to do together. Without a logger there is no file.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        folder = trainer.log_dir if trainer.loggers and not trainer.fast_dev_run else None  # type: ignore[attr-defined]
        self.path = None if folder is None else Path(folder) / FILE_NAME

    def alarm(self, trainer: L.Trainer, alarm: Alarm) -> None:
        """Tell an alarm.

        Args:
            trainer: With its loggers.
            alarm: New.
        """
        if not trainer.is_global_zero:
            return
        style = "bold yellow" if alarm.level == "warning" else "cyan"
        Console().print(Text.assemble((f"health {alarm.level}", style), " ", str(alarm)))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                text = f"**{alarm.level}: {alarm.rule}** {alarm.finding}. {alarm.advice}"
                logger.experiment.add_text("health", text, global_step=alarm.step)
        self._append({"event": "alarm", **asdict(alarm)})

    def recovery(self, trainer: L.Trainer, rule: str, iteration: int, figure: float) -> None:
        """Note in the file that a signal is healthy again, and its rule armed.

        Args:
            trainer: Knows the rank.
            rule: Its name.
            iteration: From 0.
            figure: The signal's value.
        """
        if trainer.is_global_zero:
            step = trainer.global_step
            self._append({"event": "recovery", "rule": rule, "iteration": iteration, "step": step, "figure": figure})

    def _append(self, line: dict[str, object]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            # JSON has no NaN.
            finite = {name: None if value != value else value for name, value in line.items()}
            file.write(json.dumps(finite) + "\n")
