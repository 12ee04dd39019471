"""What PPO and GRPO share: the optimizer step and the log of an iteration. No formula of either."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lit_rlhf.callbacks.completion_writer import CompletionWriter
from lit_rlhf.callbacks.distributions import Distributions
from lit_rlhf.callbacks.divergence_report import DivergenceReport
from lit_rlhf.callbacks.health_monitor import HealthMonitor
from lit_rlhf.callbacks.run_summary import RunSummary
from lit_rlhf.callbacks.std_threshold_mask import StdThresholdMask
from lit_rlhf.callbacks.throughput import Throughput
from lit_rlhf.engines.transformers import TransformersEngine
from lit_rlhf.errors import ConfigurationError, DivergedError, check_choice, check_number
from lit_rlhf.metrics.iteration import IterationMetrics
from lit_rlhf.models.forward import completion_outputs
from lit_rlhf.modules.objective import WEIGHT_MEANS, PolicyObjective
from lit_rlhf.modules.policy_loss import POLICY_MEANS
from lit_rlhf.modules.rollout_log import ROLLOUT_MAXIMA, ROLLOUT_MEANS, ROLLOUT_MINIMA, add_rollout, with_reward_std
from lit_rlhf.strategies import ROLLOUT_WEIGHTS, RolloutWeights, shards_weights

if TYPE_CHECKING:
    from lit_rlhf.engines.base import RolloutEngine
    from lit_rlhf.models.completions import CompletionOutputs
    from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch


class PolicyModule(PolicyObjective):
    """A policy trained on rollouts. Subclasses give :meth:`compute_advantages` and :meth:`loss`.

    Args:
        policy: Hub name or folder of the model to train; it is the reference, too.
        max_skipped_steps: An optimizer step with a gradient that is not finite is skipped; after this many in a row the
            run stops with a checkpoint.
        rollout_weights: Of models that FSDP2 shards: ``whole`` gathers all weights of policy, reference and critic once
            for each rollout; ``sharded`` gathers them layer by layer in every forward pass of it, which takes no more
            memory than training and, one token at a time, far longer. The numbers are the same.
        options: Of :class:`~lit_rlhf.modules.objective.PolicyObjective`: the loss, the KL penalty, and what concerns
            the model and the optimizer.
    """

    mean_names: tuple[str, ...] = ()

    def __init__(
        self, policy: str, max_skipped_steps: int = 10, rollout_weights: RolloutWeights = "whole", **options: Any
    ) -> None:
        super().__init__(policy, **options)
        check_number("max_skipped_steps", max_skipped_steps, minimum=1)
        check_choice("rollout_weights", rollout_weights, ROLLOUT_WEIGHTS)
        self.rollout_weights = rollout_weights
        self.max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0
        self._step_is_dead = False
        self._stop_asked = False
        self._rates: dict[str, float] = {}
        self.iteration_values: dict[str, float] = {}

    def setup(self, stage: str) -> None:
        """Meet the DataModule and prepare the metrics."""
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "scorer"):
            raise ConfigurationError(f"{type(self).__name__} trains on a RolloutDataModule; pass it as datamodule=...")
        self._check_rollout_weights(data.engine)
        self.check_data(data.group_size)
        self.setup_evaluation(data, stage)
        own = (*POLICY_MEANS, *WEIGHT_MEANS, *self.mean_names)
        means = (*ROLLOUT_MEANS, *own, *(f"reward/{name}" for name in data.scorer.names))
        self.iteration_metrics = IterationMetrics(
            means, ["sampling/log_prob_gap", "policy/first_step_ratio_gap", *ROLLOUT_MAXIMA], ROLLOUT_MINIMA
        )

    def _check_rollout_weights(self, engine: RolloutEngine) -> None:
        sharded = self.rollout_weights == "sharded" and shards_weights(self.trainer)
        if sharded and not isinstance(engine, TransformersEngine) and not hasattr(engine, "prepare"):
            raise ConfigurationError(
                "rollout_weights: sharded goes with the engines of this library only, but engine is "
                f"{type(engine).__name__}, which is given whole weights: write rollout_weights: whole"
            )

    def on_fit_start(self) -> None:
        """Silence two warnings of Lightning's that do not apply here."""
        # The reference is meant to be in evaluation mode, and what is logged was reduced over ranks before.
        if self.reference is not None:
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True\)`")

    def check_data(self, group_size: int) -> None:
        """Refuse what the algorithm cannot learn from, before a model is loaded.

        Args:
            group_size: Completions per prompt.
        """

    def compute_advantages(self, rollout: RolloutBatch) -> RolloutBatch:
        """Fill in ``advantages``; the only place where PPO and GRPO differ before the loss.

        Args:
            rollout: Scored rows of this rank.
        """
        raise NotImplementedError

    # The optimizer step

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """One micro-batch: its sum over the step's denominator, scaled back for accumulation and ranks."""
        assert self.policy is not None
        self._step_is_dead = batch.dead_step
        outputs = self.forward_train(batch.rows)
        if batch.step == 0:
            self._measure_gap(outputs.log_probs.detach(), batch)
        loss = self.loss(outputs, batch)
        self.iteration_metrics.update({"loss": (loss.detach(), batch.last_of_step / self.trainer.world_size)})
        # Lightning divides by the number of accumulated micro-batches, the strategy by the number of ranks.
        return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def forward_train(self, rows: RolloutBatch) -> CompletionOutputs:
        """Log-probs and entropies of the policy, with a graph.

        Args:
            rows: Of a micro-batch.
        """
        assert self.policy is not None
        return completion_outputs(self.policy, rows, rows.temperature, self.entropy_mode)

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        """Close the iteration with its last micro-batch; a stop that is asked for earlier waits for that."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data.mid_iteration:
            # An iteration that ends half-way could neither be resumed nor checkpointed.
            self._stop_asked = self._stop_asked or self.trainer.should_stop
            self.trainer.should_stop = False
            return
        self.iteration_values = self._close_iteration()
        self.trainer.should_stop = self.trainer.should_stop or self._stop_asked
        self._stop_asked = False

    def loss(self, outputs: CompletionOutputs, batch: MicroBatch) -> Tensor:
        """The micro-batch's share of the step's loss.

        Args:
            outputs: Of :meth:`forward_train`.
            batch: Rows and the step's denominator.

        Returns:
            Scalar.
        """
        raise NotImplementedError

    def _measure_gap(self, log_probs: Tensor, batch: MicroBatch) -> None:
        """Before the first step the ratio is 1: against the engine's log-probs and against the old ones."""
        rows = batch.rows
        if not bool(rows.completion_mask.any()):
            return  # nothing was compared
        old = log_probs if batch.ratio_is_one or rows.old_log_probs is None else rows.old_log_probs
        gaps = {
            "sampling/log_prob_gap": (log_probs - rows.sampling_log_probs).abs()[rows.completion_mask],
            "policy/first_step_ratio_gap": ((log_probs - old).exp() - 1).abs()[rows.completion_mask],
        }
        means = {f"{name}_mean": (gap.sum(), gap.numel()) for name, gap in gaps.items()}
        self.iteration_metrics.update(means, {name: gap.max() for name, gap in gaps.items()})

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step in which nothing can be learned moves nothing: zero gradients would still carry AdamW's momentum."""
        if self._step_is_dead:
            self._skip_step()

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Clip, and log the norm."""
        super().configure_gradient_clipping(*args, **kwargs)
        groups = self.trainer.optimizers[0].param_groups
        self._rates = {f"lr/{group.get('name', 'policy')}": group["lr"] for group in groups}
        dead = float(self._step_is_dead)
        finite = all(bool(norm.isfinite()) for norm in self.grad_norms.values())
        if not finite:
            self._skip_step()
        norms = {f"{name}/grad_norm": (norm, 1) for name, norm in self.grad_norms.items() if finite}
        self.iteration_metrics.update(
            {"policy/dead_steps": (dead, 1), "policy/skipped_steps": (float(not finite), 1), **norms}
        )
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1

    def _skip_step(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    # Callbacks, logs and checkpoints

    def configure_callbacks(self) -> list[L.Callback]:
        """What every run wants, unless the Trainer has one of its own."""
        return super().configure_callbacks() + self.unless_present(
            [
                StdThresholdMask(),
                HealthMonitor(),
                Distributions(),
                Throughput(),
                RunSummary(),
                CompletionWriter(),
                DivergenceReport(),
            ]
        )

    def _close_iteration(self) -> dict[str, float]:
        """Quantities of the iteration, reduced once over micro-batches and ranks."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        add_rollout(self.iteration_metrics, data.rollout)
        values = with_reward_std(self.iteration_metrics.compute())
        self.iteration_metrics.reset()
        self.log_prob_gap = values.get("sampling/log_prob_gap", self.log_prob_gap)
        values.update(self.extra_metrics())
        values.update({f"reward/{name}": mean for name, mean in data.scorer.extra_means.take().items()})
        values["kl/coef"] = data.rollout.kl_coef
        values.update(self._rates)
        values["step"] = self.trainer.global_step  # the x-axis: optimizer steps done
        return values

    def on_train_epoch_end(self) -> None:
        """Log the iteration."""
        values, self.iteration_values = self.iteration_values, {}
        for name, value in values.items():
            self.log(name, value, prog_bar=name in ("reward", "kl", "loss"))
        if self._skipped_in_a_row >= self.max_skipped_steps:
            self._stop_diverged()

    def _stop_diverged(self) -> None:
        """The weights are those from before the first skipped step: save them, and say what happened."""
        path = Path(self.trainer.log_dir or self.trainer.default_root_dir) / "checkpoints" / "diverged.ckpt"
        self.trainer.save_checkpoint(path)
        raise DivergedError(
            f"{self._skipped_in_a_row} optimizer steps in a row had a gradient that is not finite and were skipped "
            f"(max_skipped_steps={self.max_skipped_steps}). The weights from before are in {path}. Lower lr"
            f"{' or critic_lr' if hasattr(self, 'critic_lr') else ''}"
        )

    def extra_metrics(self) -> dict[str, float]:
        """Quantities of the iteration that are no mean, by name; the same on all ranks."""
        return {}
