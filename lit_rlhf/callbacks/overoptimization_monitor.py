"""Catch a reward that is being gamed: it rises while a held-out metric falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf.callbacks.health.report import Alarm, HealthReport
from lit_rlhf.errors import ConfigurationError, check_number

NAME = "overoptimization"
ADVICE = (
    "The policy is gaming the reward. Go on from the checkpoint with the best held-out metric; repair the reward, "
    "raise kl_coef, or stop earlier"
)


class Evaluation(NamedTuple):
    """A held-out result, and the training reward of the iterations that led to it."""

    iteration: int
    reward: float
    held_out: float


def best_evaluation(evaluations: Sequence[Evaluation], sign: int = 1) -> Evaluation:
    """The first with the best held-out result.

    Args:
        evaluations: At least one.
        sign: 1 where larger is better, else -1.
    """
    return max(evaluations, key=lambda evaluation: sign * evaluation.held_out)


def has_fallen(evaluation: Evaluation, best: Evaluation, sign: int = 1, min_fall: float = 0.05) -> bool:
    """Whether a held-out result is worse than the best by more than noise.

    Args:
        evaluation: To judge.
        best: What it is compared with.
        sign: As for :func:`best_evaluation`.
        min_fall: Smaller falls are noise.
    """
    return sign * (best.held_out - evaluation.held_out) > min_fall


def is_overoptimized(evaluations: Sequence[Evaluation], sign: int = 1, window: int = 2, min_fall: float = 0.05) -> bool:
    """Whether the last evaluations all are worse than the best one, with a higher reward.

    Args:
        evaluations: In order, at least one.
        sign: As for :func:`best_evaluation`.
        window: How many of the last.
        min_fall: As for :func:`has_fallen`.
    """
    best = best_evaluation(evaluations, sign)
    return all(has_fallen(e, best, sign, min_fall) and e.reward > best.reward for e in evaluations[-window:])


def describe(best: Evaluation, now: Evaluation, metric: str) -> str:
    """What happened in between, in words.

    Args:
        best: Of the held-out results.
        now: The newest.
        metric: Name of the held-out metric.
    """
    return (
        f"reward rose from {best.reward:.3g} to {now.reward:.3g} while {metric} went from "
        f"{best.held_out:.3g} (iteration {best.iteration}) to {now.held_out:.3g}"
    )


class OveroptimizationMonitor(ModelCheckpoint):
    """Warn when the training reward has risen while a held-out metric has fallen; keep the best checkpoint.

    A ``ModelCheckpoint`` that keeps one file, the best by the held-out metric. Acts in ``on_train_epoch_end`` of
    iterations that end with a validation and changes nothing, unless it is to stop the run. It compares the last
    ``window`` validations with the best one so far, the one before training included: all of them must be worse by more
    than ``min_fall``, with a higher training reward (the mean over the iterations since the validation before). The
    alarm is told like those of :class:`~lit_rlhf.callbacks.health_monitor.HealthMonitor`, once per episode; an episode
    ends with a validation within ``min_fall`` of the best.

    The metric has to be independent of the reward: ``val/accuracy`` is judged by the DataModule's ``verifier``, which
    is the first reward function unless another is given.

    Args:
        monitor: The held-out metric.
        mode: Whether its ``max`` or ``min`` is best.
        window: Validations in a row that must be worse.
        min_fall: How much worse, in the metric's unit; smaller falls are noise. For a share of ``n``
            held-out prompts about ``1 / sqrt(n)`` is a sensible value.
        stop: End the run at the alarm.
        dirpath: Folder of the checkpoint; ``checkpoints`` in the log folder by default.
        filename: Of the checkpoint.
    """

    def __init__(
        self,
        monitor: str = "val/accuracy",
        mode: Literal["max", "min"] = "max",
        window: int = 2,
        min_fall: float = 0.05,
        stop: bool = False,
        dirpath: str | None = None,
        filename: str = "best-held-out",
    ) -> None:
        check_number("OveroptimizationMonitor: window", window, minimum=1)
        check_number("OveroptimizationMonitor: min_fall", min_fall, minimum=0)
        if mode not in ("max", "min"):
            raise ConfigurationError(f"OveroptimizationMonitor: mode must be 'max' or 'min', got {mode!r}")
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            auto_insert_metric_name=False,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.window = window
        self.min_fall = min_fall
        self.stop = stop
        self.evaluations: list[Evaluation] = []
        self.alarms: list[Alarm] = []
        self._rewards: list[float] = []
        self._in_episode = False
        self._validated = False
        self._report: HealthReport | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run without held-out prompts."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if trainer.limit_val_batches == 0:
            raise ConfigurationError(
                f"OveroptimizationMonitor compares the reward with {self.monitor}: give the RolloutDataModule held-out "
                "prompts (val=...) and leave limit_val_batches alone"
            )
        self._report = HealthReport(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The held-out metric is new in this iteration."""
        super().on_validation_end(trainer, pl_module)
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the reward; after a validation judge, then keep the checkpoint if it is the best."""
        metrics, iteration = trainer.callback_metrics, trainer.datamodule.iteration - 1  # type: ignore[attr-defined]
        if "reward" in metrics:
            self._rewards.append(float(metrics["reward"]))
        before = getattr(pl_module, "initial_metrics", {}).get(self.monitor)
        if before is not None and not self.evaluations and len(self._rewards) == 1:
            self.evaluations.append(Evaluation(iteration, self._rewards[0], before))
        if not self._validated:
            return
        self._validated = False
        if self.monitor in metrics and self._rewards:
            reward = sum(self._rewards) / len(self._rewards)
            self._rewards = []
            self.evaluations.append(Evaluation(iteration, reward, float(metrics[self.monitor])))
            self._judge(trainer)
        # After the judgement: what is remembered of it belongs to the checkpoint.
        super().on_train_epoch_end(trainer, pl_module)

    def _judge(self, trainer: L.Trainer) -> None:
        sign = 1 if self.mode == "max" else -1
        best, now = best_evaluation(self.evaluations, sign), self.evaluations[-1]
        self._in_episode = self._in_episode and has_fallen(now, best, sign, self.min_fall)
        if self._in_episode or not is_overoptimized(self.evaluations, sign, self.window, self.min_fall):
            return
        self._in_episode = True
        finding = describe(best, now, str(self.monitor))
        advice = f"{ADVICE}. It is {self.best_model_path}" if self.best_model_path else ADVICE
        alarm = Alarm(
            *(NAME, "warning", now.iteration, trainer.global_step, str(self.monitor)),
            figure=now.held_out,
            threshold=best.held_out - sign * self.min_fall,
            finding=finding,
            advice=f"{advice}.",
        )
        self.alarms.append(alarm)
        assert self._report is not None
        self._report.alarm(trainer, alarm)
        if self.stop:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint's and what was seen; the same on all ranks."""
        seen = {
            "evaluations": [tuple(evaluation) for evaluation in self.evaluations],
            "rewards": list(self._rewards),
            "in_episode": self._in_episode,
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }
        return {**super().state_dict(), NAME: seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; the best checkpoint stays the best, also where the log folder is a new one."""
        super().load_state_dict(state_dict)
        for name in ("best_model_score", "best_model_path", "best_k_models", "kth_best_model_path", "kth_value"):
            setattr(self, name, state_dict[name])
        seen = state_dict[NAME]
        self.evaluations = [Evaluation(*evaluation) for evaluation in seen["evaluations"]]
        self._rewards, self._in_episode = list(seen["rewards"]), seen["in_episode"]
        self.alarms = [Alarm(**alarm) for alarm in seen["alarms"]]
