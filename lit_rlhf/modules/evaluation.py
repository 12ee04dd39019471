"""validate, test and predict: what every policy module does with held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torchmetrics import MeanMetric, Metric

from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.metrics.pass_at_k import PassAtK
from lit_rlhf.modules.causal_lm import CausalLMModule
from lit_rlhf.rollout.evaluation import Judged, evaluate_prompts

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.rollout.datamodule import RolloutDataModule


class HeldOutEvaluation(CausalLMModule):
    """Greedy accuracy, sampled accuracy and pass@k on prompts that are not trained on.

    Logged under ``val/`` or ``test/``: ``accuracy`` (greedy), ``sampled_accuracy``, ``pass@k``, ``reward`` (of the
    sampled completions), ``completion_length`` and ``truncated``, each a mean over all prompts and ranks. Before the
    first iteration of ``fit`` all held-out prompts are evaluated too; :attr:`initial_metrics` keeps that result.
    """

    initial_metrics: dict[str, float]
    last_evaluation: dict[str, Any] | None = None  # of the validation before the next checkpoint, with its step
    held_out: dict[str, Metric]

    def setup_evaluation(self, data: RolloutDataModule, stage: str) -> None:
        """Create the metrics; let the sanity check be a whole evaluation.

        Args:
            data: Says which pass@k there are.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        self.initial_metrics = {}
        names = ["accuracy", "completion_length", "truncated", "reward"]
        metrics: dict[str, Metric] = {name: MeanMetric() for name in names}
        if data.val_samples:
            metrics["sampled_accuracy"] = MeanMetric()
            metrics.update({f"pass@{k}": PassAtK(k) for k in data.pass_k})
        self.held_out = metrics
        self._held_out = nn.ModuleDict(metrics)  # moves them with the module
        if stage == "fit" and self.trainer.num_sanity_val_steps:
            self.trainer.num_sanity_val_steps = float("inf")

    def validation_step(self, batch: Sequence[Prompt], batch_idx: int) -> None:
        """Complete and judge a batch of held-out prompts."""
        self._evaluate(batch)

    def test_step(self, batch: Sequence[Prompt], batch_idx: int) -> None:
        """Complete and judge a batch of test prompts."""
        self._evaluate(batch)

    def predict_step(self, batch: Sequence[Prompt], batch_idx: int) -> list[dict[str, Any]]:
        """Greedy and sampled completions of a batch as plain records, one per completion."""
        greedy, sampled = evaluate_prompts(self, self._rollout_data, batch)
        records = _records(greedy, "greedy")
        return records + (_records(sampled, "sampled") if sampled else [])

    def on_validation_epoch_end(self) -> None:
        """Log the held-out metrics; those of the time before training go straight to the loggers."""
        if self.trainer.sanity_checking:
            values = self._computed("val")
            self.initial_metrics = values
            self._remember(values)
            for logger in self.trainer.loggers:
                logger.log_metrics(values, step=self.trainer.global_step)
            return
        self._log_held_out("val")

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_held_out("test")

    def _evaluate(self, batch: Sequence[Prompt]) -> None:
        greedy, sampled = evaluate_prompts(self, self._rollout_data, batch)
        if not batch:  # other ranks had prompts, and gathered weights with this one
            return
        metrics = self.held_out
        metrics["accuracy"].update(greedy.correct.float())
        shown = sampled or greedy
        if sampled is not None:
            metrics["sampled_accuracy"].update(sampled.correct.float())
            for name, metric in metrics.items():
                if name.startswith("pass@"):
                    metric.update(sampled.correct)
        rollout = shown.rollout
        metrics["completion_length"].update(rollout.completion_lengths.float())
        metrics["truncated"].update((~rollout.finished).float())
        # A weighted mean over the scored rows; abstaining rows have no reward.
        count = rollout.scored_mask.sum()
        if count > 0:
            metrics["reward"].update(masked_sum(rollout.rewards, rollout.scored_mask) / count, weight=count)

    def _log_held_out(self, prefix: str) -> None:
        # Already reduced over ranks by the metrics.
        values = self._computed(prefix)
        if self.trainer.state.fn == "fit":
            self._remember(values)
            values["step"] = float(self.trainer.global_step)  # the x-axis: optimizer steps done
        self.log_dict(values)

    def _remember(self, values: dict[str, float]) -> None:
        self.last_evaluation = {"step": self.trainer.global_step, "metrics": dict(values)}

    def _computed(self, prefix: str) -> dict[str, float]:
        # Every rank computes every metric (ranks exchange their sums in it); one without a value is left out.
        values = {f"{prefix}/{name}": float(metric.compute()) for name, metric in self.held_out.items()}
        for metric in self.held_out.values():
            metric.reset()
        return {name: value for name, value in values.items() if not math.isnan(value)}

    @property
    def _rollout_data(self) -> RolloutDataModule:
        return self.trainer.datamodule  # type: ignore[attr-defined]


def _records(judged: Judged, kind: str) -> list[dict[str, Any]]:
    rollout = judged.rollout
    correct = judged.correct.reshape(-1).tolist()
    return [
        {
            "prompt_index": rollout.prompt_index[row].item(),
            "prompt": rollout.prompts[row],
            "completion": rollout.completions[row],
            "sampling": kind,
            "correct": correct[row],
            "reward": rollout.rewards[row].item() if rollout.scored_mask[row] else None,
            "tokens": rollout.completion_lengths[row].item(),
            "finish_reason": "stop" if rollout.finished[row] else "length",
        }
        for row in range(len(rollout))
    ]
