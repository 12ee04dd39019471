"""validate, test and predict: what every policy module does with held-out prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
from torch import nn

from lit_rlhf.callbacks.evaluation_writer import EvaluationWriter
from lit_rlhf.metrics import HumanAgreement, PromptResults
from lit_rlhf.modules.causal_lm import CausalLMModule
from lit_rlhf.rollout.evaluation import Evaluated, Judged, evaluate_prompts, prompt_values, votes

if TYPE_CHECKING:
    from lit_rlhf.rollout.datamodule import RolloutDataModule
    from lit_rlhf.rollout.held_out import HeldOutBatch

# Means that are not a share of right completions, and say nothing about how good the policy is.
_PLAIN = ("completion_length", "truncated", "reward")


class HeldOutEvaluation(CausalLMModule):
    """Greedy accuracy, sampled accuracy, pass@k and a majority vote on prompts that are not trained on.

    Logged under ``val/`` or ``test/``: ``accuracy`` (greedy), ``sampled_accuracy``, ``pass@k``, ``maj@n`` (where the
    verifier says what is voted on), ``verifier`` (the mean score of one that is no training reward), each with the
    ends of a bootstrap interval over prompts, ``_low`` and ``_high``; ``reward`` (of the sampled completions),
    ``completion_length`` and ``truncated``; with ratings ``human_rating`` and what belongs to it. All over all prompts
    and ranks; of several data sets each has its own, too: ``val/<set>/accuracy``. Before the first iteration of ``fit``
    all held-out prompts are evaluated too; :attr:`initial_metrics` keeps that result.
    """

    initial_metrics: dict[str, float]
    last_evaluation: dict[str, Any] | None = None  # of the validation before the next checkpoint, with its step
    prompt_results: PromptResults
    human_agreement: HumanAgreement | None
    _loaded_step: int | None = None

    def setup_evaluation(self, data: RolloutDataModule, stage: str) -> None:
        """Create the metrics; let the sanity check be a whole evaluation.

        Args:
            data: Says which data sets and which pass@k there are.
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        self.initial_metrics = {}
        shares = ["accuracy"]
        if data.val_samples:
            shares += ["sampled_accuracy", *(f"pass@{k}" for k in data.pass_k)]
        if votes(data):
            shares.append(f"maj@{data.val_samples}")
        main = [*shares, *(["verifier"] if data.verifier else [])]
        parts = data.parts("val" if stage in ("fit", "validate") else "test")
        self.prompt_results = PromptResults(
            [*main, *_PLAIN],
            [part.partition("/")[2] for part in parts] or [""],
            shares=[*shares, "truncated"],
            with_interval=main,
            confidence=data.val_confidence,
        )
        self.human_agreement = None if data.ratings is None else HumanAgreement(data.ratings.total)
        # Moves them with the module.
        self._held_out = nn.ModuleList([self.prompt_results, *([self.human_agreement] if self.human_agreement else [])])
        if stage == "fit" and self.trainer.num_sanity_val_steps:
            self.trainer.num_sanity_val_steps = float("inf")

    def configure_callbacks(self) -> list[L.Callback]:
        """Besides the others one that writes the result of each prompt, unless the Trainer has one of its own."""
        return super().configure_callbacks() + self.unless_present([EvaluationWriter()])

    @property
    def evaluated_step(self) -> int:
        """Optimizer steps that the policy under evaluation has had: of the run, or of the checkpoint it is from."""
        return self.trainer.global_step if self.is_fitting else self._loaded_step or 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Know how far the policy is that is evaluated."""
        self._loaded_step = checkpoint.get("global_step")

    def on_validation_epoch_start(self) -> None:
        """Let an engine that is at work for the next iteration finish: its weights are about to be replaced."""
        self._rollout_data.ahead.wait(self.trainer)

    def validation_step(self, batch: HeldOutBatch, batch_idx: int) -> Evaluated:  # type: ignore[override]
        """Complete and judge a batch of held-out prompts."""
        return self._evaluate(batch)

    def test_step(self, batch: HeldOutBatch, batch_idx: int) -> Evaluated:  # type: ignore[override]
        """Complete and judge a batch of test prompts."""
        return self._evaluate(batch)

    def predict_step(self, batch: HeldOutBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Greedy and sampled completions of a batch as plain records, one per completion."""
        evaluated = evaluate_prompts(self, self._rollout_data, batch)
        records = _records(evaluated.greedy, "greedy", batch.set_name)
        return records + (_records(evaluated.sampled, "sampled", batch.set_name) if evaluated.sampled else [])

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

    def _evaluate(self, batch: HeldOutBatch) -> Evaluated:
        data = self._rollout_data
        evaluated = evaluate_prompts(self, data, batch)
        # With no prompt, too: ranks gather what each of them has.
        index = evaluated.greedy.rollout.prompt_index
        self.prompt_results.update(batch.set_place, index, prompt_values(evaluated, data.pass_k))
        if self.human_agreement is not None:
            assert data.ratings is not None
            self.human_agreement.update(*data.ratings.join(evaluated))
        return evaluated

    def _log_held_out(self, prefix: str) -> None:
        # Already reduced over ranks by the metrics.
        values = self._computed(prefix)
        if self.is_fitting:
            self._remember(values)
        if self.is_fitting or self._loaded_step is not None:
            values["step"] = float(self.evaluated_step)  # the x-axis: optimizer steps done
        self.log_dict(values)

    def _remember(self, values: dict[str, float]) -> None:
        self.last_evaluation = {"step": self.trainer.global_step, "metrics": dict(values)}

    def _computed(self, prefix: str) -> dict[str, float]:
        # Every rank computes every metric: ranks exchange their rows in it.
        values = self.prompt_results.compute()
        self.prompt_results.reset()
        if self.human_agreement is not None:
            values.update(self.human_agreement.compute())
            self.human_agreement.reset()
        return {f"{prefix}/{name}": value for name, value in values.items()}

    @property
    def _rollout_data(self) -> RolloutDataModule:
        return self.trainer.datamodule  # type: ignore[attr-defined]


def _records(judged: Judged, kind: str, set_name: str) -> list[dict[str, Any]]:
    rollout = judged.rollout
    correct = judged.correct.reshape(-1).tolist()
    return [
        {
            **({"set": set_name} if set_name else {}),
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
