"""What PPO and GRPO share: the reference, the scoring of a rollout, the training step. No formula of either."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from lit_rlhf.callbacks.completion_writer import CompletionWriter
from lit_rlhf.callbacks.run_summary import RunSummary
from lit_rlhf.callbacks.std_threshold_mask import StdThresholdMask
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional.kl import kl_k1
from lit_rlhf.functional.losses import loss_denominator
from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.metrics.iteration import IterationMetrics
from lit_rlhf.models.forward import completion_log_probs
from lit_rlhf.models.reference import FrozenReference, forget_missing_reference
from lit_rlhf.modules.evaluation import HeldOutEvaluation
from lit_rlhf.modules.rollout_log import ROLLOUT_MEANS, RolloutLog

if TYPE_CHECKING:
    from lit_rlhf.functional.losses import Aggregation
    from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch

KLPlacement = Literal["reward", "loss"]

# Below this gap in float32 the engine's log-probs and the training forward's are the same numbers.
LOG_PROB_TOLERANCE = 1e-5


class PolicyModule(HeldOutEvaluation):
    """A policy trained on rollouts. Subclasses give :meth:`compute_advantages` and :meth:`loss`.

    Args:
        policy: See :class:`~lit_rlhf.modules.causal_lm.CausalLMModule`.
        kl_coef: Weight of the KL penalty; at 0 no reference is loaded.
        kl_placement: ``reward`` or ``loss``.
        loss_aggregation: ``token_mean``, ``sequence_mean`` or ``constant``, see ``functional.losses.aggregate``.
        entropy_coef: Weight of the entropy bonus.
        optimization: Options of :class:`~lit_rlhf.modules.causal_lm.CausalLMModule`.
    """

    mean_names: tuple[str, ...] = ()

    def __init__(
        self,
        policy: str,
        kl_coef: float,
        kl_placement: KLPlacement,
        loss_aggregation: Aggregation,
        entropy_coef: float,
        **optimization: Any,
    ) -> None:
        super().__init__(policy, **optimization)
        if kl_coef < 0:
            raise ConfigurationError(f"kl_coef must not be negative, got {kl_coef}")
        if kl_placement not in ("reward", "loss"):
            raise ConfigurationError(f"kl_placement must be 'reward' or 'loss', got {kl_placement!r}")
        self.kl_coef = kl_coef
        self.kl_placement = kl_placement
        self.loss_aggregation = loss_aggregation
        self.entropy_coef = entropy_coef
        self.reference: FrozenReference | None = None
        self.log_prob_gap: float | None = None
        self._step_is_dead = False
        self.register_load_state_dict_post_hook(forget_missing_reference)

    def configure_model(self) -> None:
        """Build the policy and, where it is needed, its frozen copy."""
        if self.policy is not None:
            return
        super().configure_model()
        assert self.policy is not None
        if self.kl_coef > 0 and self.trainer.state.fn == "fit":
            self.reference = FrozenReference(self.policy)

    def setup(self, stage: str) -> None:
        """Meet the DataModule and prepare the metrics."""
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "scorer"):
            raise ConfigurationError(f"{type(self).__name__} trains on a RolloutDataModule; pass it as datamodule=...")
        self.check_data(data.group_size)
        self.setup_evaluation(data, stage)
        means = (*ROLLOUT_MEANS, *self.mean_names, *(f"reward/{name}" for name in data.scorer.names))
        self.iteration_metrics = IterationMetrics(
            means, ["sampling/log_prob_gap", "policy/first_step_ratio_gap", "completion/max_length"]
        )
        self.rollout_log = RolloutLog()

    def on_fit_start(self) -> None:
        """Lightning warns of modules in evaluation mode; the reference is meant to be."""
        if self.reference is not None:
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")

    def check_data(self, group_size: int) -> None:
        """Refuse what the algorithm cannot learn from, before a model is loaded.

        Args:
            group_size: Completions per prompt.
        """

    def numerics_summary(self) -> str:
        """The choices that make up this objective, in one line."""
        raise NotImplementedError

    # The rollout, as far as the module is concerned

    def score_rollout(self, rollout: RolloutBatch, parts: list[list[int]], ratio_is_one: bool) -> RolloutBatch:
        """Reference log-probs, and old log-probs where the ratio is not 1 by construction.

        Args:
            rollout: ``N`` rows with rewards.
            parts: Rows of each forward pass.
            ratio_is_one: The rollout serves a single optimizer step.
        """
        changes: dict[str, Any] = {"kl_coef": self.kl_coef}
        if not ratio_is_one or (self.reference is not None and self.kl_placement == "reward"):
            changes["old_log_probs"] = self._old_log_probs(rollout, parts)
        if self.reference is not None:
            changes["ref_log_probs"] = self._no_grad_log_probs(self.reference.model, rollout, parts)
        return rollout.replace(**changes)

    def _old_log_probs(self, rollout: RolloutBatch, parts: list[list[int]]) -> Tensor:
        """The engine's own where they were found to equal the training forward's, else a pass of that forward."""
        if self.log_prob_gap is not None and self.log_prob_gap <= LOG_PROB_TOLERANCE:
            return rollout.sampling_log_probs
        return self._no_grad_log_probs(self.policy, rollout, parts)

    @torch.no_grad()
    def _no_grad_log_probs(self, model: nn.Module | None, rollout: RolloutBatch, parts: list[list[int]]) -> Tensor:
        assert model is not None
        log_probs = torch.zeros_like(rollout.sampling_log_probs)
        for rows in parts:
            part = rollout.select(rows).trim()
            values, _ = forward_rows(model, part)
            log_probs[torch.tensor(rows, device=log_probs.device), : values.shape[1]] = values
        return log_probs

    def compute_advantages(self, rollout: RolloutBatch) -> RolloutBatch:
        """Fill in ``advantages``; the only place where PPO and GRPO differ before the loss.

        Args:
            rollout: Scored rows of this rank.
        """
        raise NotImplementedError

    def live_rows(self, rollout: RolloutBatch) -> Tensor:
        """Rows with something to teach: a token with an advantage, or a term of the loss that needs none.

        Args:
            rollout: With advantages.

        Returns:
            ``(N,)`` bool.
        """
        assert rollout.advantages is not None
        taught = rollout.completion_mask
        if self.entropy_coef == 0 and not (self.kl_placement == "loss" and rollout.kl_coef > 0):
            taught = taught & (rollout.advantages != 0)
        return taught.any(dim=-1)

    def loss_denominator(self, rollout: RolloutBatch, max_new_tokens: int) -> float:
        """This rank's share of an optimizer step's loss denominator. Rows that nobody scored leave it.

        Args:
            rollout: Rows of the step.
            max_new_tokens: The sampling limit.
        """
        mask = rollout.completion_mask
        if self.loss_aggregation != "constant":
            mask = mask & rollout.scored_mask[:, None]
        return loss_denominator(mask, self.loss_aggregation, max_new_tokens)

    # The optimizer step

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """One micro-batch: its sum over the step's denominator, scaled back for accumulation and ranks."""
        assert self.policy is not None
        self._step_is_dead = batch.dead_step
        if batch_idx == 0:
            self.rollout_log.training_started = time.perf_counter()
        with_bonus = self.entropy_coef > 0
        log_probs, entropy = forward_rows(self.policy, batch.rows, with_entropy=True, train_entropy=with_bonus)
        assert entropy is not None
        if batch.step == 0:
            self._measure_gap(log_probs.detach(), batch)
        loss = self.loss(log_probs, entropy, batch)
        # Lightning divides by the number of accumulated micro-batches, the strategy by the number of ranks.
        return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def loss(self, log_probs: Tensor, entropy: Tensor, batch: MicroBatch) -> Tensor:
        """The micro-batch's share of the step's loss.

        Args:
            log_probs: ``(N, T)`` with a graph.
            entropy: ``(N, T)``, with a graph where it is part of the loss.
            batch: Rows and the step's denominator.

        Returns:
            Scalar.
        """
        raise NotImplementedError

    def _measure_gap(self, log_probs: Tensor, batch: MicroBatch) -> None:
        """Before the first step the ratio is 1: against the engine's log-probs and against the old ones."""
        rows = batch.rows
        old = log_probs if batch.ratio_is_one or rows.old_log_probs is None else rows.old_log_probs
        zero = log_probs.new_zeros(())
        gap = torch.where(rows.completion_mask, (log_probs - rows.sampling_log_probs).abs(), zero).max()
        ratio_gap = torch.where(rows.completion_mask, ((log_probs - old).exp() - 1).abs(), zero).max()
        self.iteration_metrics.update({}, {"sampling/log_prob_gap": gap, "policy/first_step_ratio_gap": ratio_gap})

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step in which nothing can be learned moves nothing: zero gradients would still carry AdamW's momentum."""
        if self._step_is_dead:
            for parameter in self.parameters():
                parameter.grad = None

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Clip, and log the norm."""
        super().configure_gradient_clipping(*args, **kwargs)
        dead = float(self._step_is_dead)
        norm = {} if self.grad_norm is None else {"policy/grad_norm": (self.grad_norm, 1)}
        self.iteration_metrics.update({"policy/dead_steps": (dead, 1), **norm})

    # Callbacks, logs and checkpoints

    def configure_callbacks(self) -> list[L.Callback]:
        """Schedule, export, std-threshold mask, summary and writer of predictions, unless the Trainer has them."""
        defaults: list[L.Callback] = [StdThresholdMask(), RunSummary(), CompletionWriter()]
        present = {type(callback) for callback in self.trainer.callbacks}  # type: ignore[attr-defined]
        return super().configure_callbacks() + [callback for callback in defaults if type(callback) not in present]

    def on_train_epoch_end(self) -> None:
        """Log the iteration, reduced once over micro-batches and ranks."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data.rollout is not None:
            self.rollout_log.add_rollout(self.iteration_metrics, data.rollout)
        values = self.iteration_metrics.compute()
        self.iteration_metrics.reset()
        self.log_prob_gap = values.get("sampling/log_prob_gap", self.log_prob_gap)
        values.update(self.rollout_log.phases(data, self.trainer))
        values["kl/coef"] = self.kl_coef
        for group in self.trainer.optimizers[0].param_groups:
            values[f"lr/{group.get('name', 'policy')}"] = group["lr"]
        for name, value in values.items():
            self.log(name, value, prog_bar=name in ("reward", "kl", "loss"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the module remembers between iterations; refuse to save in the middle of one."""
        data = getattr(self.trainer, "datamodule", None)
        if getattr(data, "mid_iteration", False):
            raise ConfigurationError(
                "a checkpoint in the middle of an iteration would not resume exactly; checkpoint at its end: "
                "ModelCheckpoint(every_n_epochs=1), without every_n_train_steps or train_time_interval"
            )
        checkpoint["lit_rlhf"] = {"log_prob_gap": self.log_prob_gap, "kl_placement": self.kl_placement}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it; another placement of the KL penalty is another objective and refused."""
        saved = checkpoint.get("lit_rlhf", {})
        placement = saved.get("kl_placement", self.kl_placement)
        if placement != self.kl_placement and self.trainer.state.fn == "fit":
            raise ConfigurationError(
                f"the checkpoint was trained with kl_placement={placement!r}, now it is {self.kl_placement!r}: "
                "resume with the same one, or start a new run from the exported policy"
            )
        self.log_prob_gap = saved.get("log_prob_gap")


def forward_rows(
    model: nn.Module, rows: RolloutBatch, with_entropy: bool = False, train_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (and entropies) of a batch's completion tokens under a model.

    Args:
        model: Policy or reference.
        rows: ``(N, T)`` completions.
        with_entropy: Also give entropies.
        train_entropy: With a graph.
    """
    log_probs, entropy = completion_log_probs(
        model,
        rows.prompt_ids,
        rows.prompt_lengths,
        rows.completion_ids,
        rows.completion_lengths,
        rows.temperature,
        with_entropy,
    )
    return log_probs, entropy if entropy is None or train_entropy else entropy.detach()


def sequence_kl(rollout: RolloutBatch) -> Tensor | None:
    """Per-token k1 of the rollout against the reference, ``(N, T)``, 0 outside the mask; ``None`` without one.

    Args:
        rollout: Scored rows.
    """
    if rollout.ref_log_probs is None:
        return None
    old = rollout.sampling_log_probs if rollout.old_log_probs is None else rollout.old_log_probs
    zero = torch.zeros((), device=old.device)
    return torch.where(rollout.completion_mask, kl_k1(old, rollout.ref_log_probs), zero)


def masked_total(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count over the tokens that count, for the metrics.

    Args:
        values: ``(N, T)``.
        mask: ``(N, T)`` bool.
    """
    return masked_sum(values.detach(), mask), mask.sum()
