"""Say early, in plain words, what is going wrong with a run and what to change."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning as L

from lit_rlhf.callbacks.health.history import RunHistory
from lit_rlhf.callbacks.health.report import Alarm, HealthReport
from lit_rlhf.callbacks.health.rule import HealthRule, Level
from lit_rlhf.callbacks.health.rules import choose_rules
from lit_rlhf.callbacks.health.signals import derived_signals
from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    from lit_rlhf.rollout.datamodule import RolloutDataModule


class HealthMonitor(L.Callback):
    """Compare the metrics of each iteration with a table of rules; raise an alarm once per episode.

    Acts in ``on_train_epoch_end`` and changes nothing. An alarm has the figure and an advice; it goes to the console,
    to TensorBoard as text and, where there is a logger, to ``health.jsonl`` in the log folder. The rule is armed again
    once its signal has been healthy for as many iterations as its window has. Episodes are part of the checkpoint: a
    resumed run neither repeats nor forgets them.

    :attr:`alarms` has all alarms of the run.

    Args:
        rules: Further rules; one with the name of a shipped rule
            (:data:`~lit_rlhf.callbacks.health.rules.DEFAULT_RULES`) takes its place.
        silence: Names of rules to leave out.
        thresholds: Another threshold, by name of the rule.
    """

    def __init__(
        self,
        rules: list[HealthRule] | None = None,
        silence: list[str] | None = None,
        thresholds: dict[str, float] | None = None,
    ) -> None:
        self.rules = choose_rules(rules or (), silence or (), thresholds)
        self.history = RunHistory((rule.signal, rule.window) for rule in self.rules)
        self.alarms: list[Alarm] = []
        self._levels: dict[str, Level] = {}  # of the rules whose episode is not over
        self._healthy: dict[str, int] = {}  # iterations in a row that such a rule has been healthy for
        self._validated = False
        self._report: HealthReport | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module without rollouts."""
        if stage != "fit":
            return
        if not hasattr(pl_module, "iteration_values"):
            raise ConfigurationError(
                f"HealthMonitor watches rollouts (PPOModule, GRPOModule); {type(pl_module).__name__} has none"
            )
        self._report = HealthReport(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Held-out metrics are new in this iteration."""
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Judge the iteration."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        values: dict[str, float] = dict(pl_module.iteration_values)  # type: ignore[arg-type]
        if self._validated:
            values.update({n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val/")})
        self._validated = False
        self.history.see_rewards(values)
        vocabulary = pl_module.model_config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        compared = data.group_size if getattr(pl_module, "uses_group_baseline", False) else 1
        if compared == 1:
            values.pop("group/effective_ratio", None)  # rewards that agree teach as well as others
        steps = data.optimizer_steps_per_iteration
        values.update(derived_signals(values, self.history, vocabulary, compared, steps))
        present = self.history.add(values)
        for rule in self.rules:
            if rule.signal in present:
                self._judge(rule, trainer, data.iteration - 1)

    def _judge(self, rule: HealthRule, trainer: L.Trainer, iteration: int) -> None:
        figure = rule.figure(self.history)
        if figure is None:
            return
        assert self._report is not None
        if not rule.is_unhealthy(figure):
            self._healthy[rule.name] = self._healthy.get(rule.name, 0) + 1
            if rule.name in self._levels and self._healthy[rule.name] >= rule.window and not rule.once:
                del self._levels[rule.name]
                self._report.recovery(trainer, rule.name, iteration, figure)
            return
        self._healthy[rule.name] = 0
        if any(name in self._levels for name in rule.covered_by):
            return
        solved = rule.info_when_solved and self.history.is_solved
        level: Level = "info" if solved else rule.level
        known = self._levels.get(rule.name)
        if known is None or (known == "info" and level == "warning"):
            self._levels[rule.name] = level
            self.alarms.append(_alarm(rule, level, figure, solved, iteration, trainer.global_step))
            self._report.alarm(trainer, self.alarms[-1])

    def state_dict(self) -> dict[str, Any]:
        """What was seen and said; the same on all ranks."""
        return {
            "history": self.history.state_dict(),
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "levels": dict(self._levels),
            "healthy": dict(self._healthy),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.history.load_state_dict(state_dict["history"])
        self.alarms = [Alarm(**alarm) for alarm in state_dict["alarms"]]
        self._levels, self._healthy = dict(state_dict["levels"]), dict(state_dict["healthy"])


def _alarm(rule: HealthRule, level: Level, figure: float, solved: bool, iteration: int, step: int) -> Alarm:
    side = "over" if rule.when == "above" else "under"
    unit = " of its first value" if rule.relative else ""
    window = f" (median of {rule.window} iterations)" if rule.window > 1 else ""
    finding = f"{rule.signal} is {figure:.3g}{unit}, {side} {rule.threshold:g}{window}"
    advice = f"No fault while rewards are near the best seen, as they are now. {rule.advice}" if solved else rule.advice
    return Alarm(rule.name, level, iteration, step, rule.signal, figure, rule.threshold, finding, advice)
