r"""GRPO: the completions of one prompt are each other's baseline; no critic.

Source: DeepSeekMath (arXiv 2402.03300). Deviations from the paper, each an option:

* the KL penalty is in the reward by default (the paper puts it in the loss);
* the loss is a mean over the tokens of the optimizer step (the paper: over sequences, then over the batch);
* a group whose task rewards agree has advantage exactly 0, judged before the KL penalty
  (:class:`~lit_rlhf.callbacks.StdThresholdMask`).
"""

from __future__ import annotations

from torch import Tensor

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional.advantages import BASELINES, Baseline, group_advantages
from lit_rlhf.functional.kl import kl_k3_ratio
from lit_rlhf.functional.losses import (
    AGGREGATIONS,
    Aggregation,
    aggregate,
    clipped_policy_loss,
    clipped_tokens,
    importance_ratio,
)
from lit_rlhf.modules.base import KLPlacement, PolicyModule, masked_total, sequence_kl
from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch


class GRPOModule(PolicyModule):
    """Group Relative Policy Optimization of a Hugging Face causal language model.

    Args:
        policy: Hub name or folder of the model to train; a frozen copy of it is the reference.
        kl_coef: Weight of the KL penalty against the reference (useful range 0.01 to 0.1). At 0 no reference is loaded.
        kl_placement: ``reward`` subtracts the penalty from the reward before the group baseline; ``loss`` adds it to
            the loss. A run must be resumed with the placement it was started with.
        clip_range: The importance ratio may fall to ``1 - clip_range`` and rise to ``1 + clip_range``.
        clip_range_high: Another upper range, if given.
        baseline: Of a group: ``mean``, ``median``, ``leave_one_out`` or ``none``.
        scale_by_std: Divide advantages by the group's standard deviation.
        std_eps: Added to that deviation.
        std_ddof: 0 for the population deviation, 1 for Bessel's correction.
        loss_aggregation: ``token_mean``, ``sequence_mean`` or ``constant`` (rows times ``max_new_tokens``), each over
            the whole optimizer step.
        entropy_coef: Weight of an entropy bonus.
        lr: Learning rate after warm-up (1e-6 to 5e-6 for models of billions of parameters).
        weight_decay: AdamW's decoupled weight decay.
        betas: AdamW's moments.
        max_grad_norm: Gradients are scaled down to this norm; ``null`` switches it off.
        warmup_ratio: Share of all optimizer steps during which the learning rate rises; a cosine follows.
        dtype: Type of the weights: ``float32``, ``bfloat16`` or ``float16``.
        attn_implementation: Attention of transformers, for instance ``sdpa`` or ``eager``; its own choice by default.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
    """

    mean_names = (
        "loss",
        "policy/loss",
        "policy/entropy",
        "policy/clip_fraction",
        "policy/ratio",
        "policy/advantage_abs",
    )

    def __init__(
        self,
        policy: str,
        kl_coef: float = 0.04,
        kl_placement: KLPlacement = "reward",
        clip_range: float = 0.2,
        clip_range_high: float | None = None,
        baseline: Baseline = "mean",
        scale_by_std: bool = True,
        std_eps: float = 1e-4,
        std_ddof: int = 0,
        loss_aggregation: Aggregation = "token_mean",
        entropy_coef: float = 0.0,
        lr: float = 2e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float | None = 1.0,
        warmup_ratio: float = 0.03,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__(
            policy,
            kl_coef,
            kl_placement,
            loss_aggregation,
            entropy_coef,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            max_grad_norm=max_grad_norm,
            warmup_ratio=warmup_ratio,
            dtype=dtype,
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
        )
        for name, value, allowed in (
            ("loss_aggregation", loss_aggregation, AGGREGATIONS),
            ("baseline", baseline, BASELINES),
        ):
            if value not in allowed:
                raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0.0 <= clip_range < 1.0:
            raise ConfigurationError(f"clip_range must lie in [0, 1), got {clip_range}")
        self.clip_low = clip_range
        self.clip_high = clip_range if clip_range_high is None else clip_range_high
        self.baseline: Baseline = baseline
        self.scale_by_std = scale_by_std
        self.std_eps = std_eps
        self.std_ddof = std_ddof
        self.save_hyperparameters()

    @property
    def uses_group_baseline(self) -> bool:
        """Whether advantages come from comparing the completions of one prompt."""
        return self.baseline != "none" or self.scale_by_std

    def numerics_summary(self) -> str:
        """The choices that make up this objective, in one line."""
        scale = f"divided by std (ddof {self.std_ddof}) + {self.std_eps:g}" if self.scale_by_std else "not scaled"
        penalty = f"KL in the {self.kl_placement}, coefficient {self.kl_coef:g}" if self.kl_coef else "no KL penalty"
        return (
            f"baseline {self.baseline}, {scale}; clip [{1 - self.clip_low:g}, {1 + self.clip_high:g}]; "
            f"{self.loss_aggregation}; {penalty}"
        )

    def check_data(self, group_size: int) -> None:
        """A group of one has no baseline."""
        if group_size < 2 and self.uses_group_baseline:
            raise ConfigurationError(
                f"GRPO compares the completions of one prompt: group_size must be at least 2, got {group_size}"
            )

    def compute_advantages(self, rollout: RolloutBatch) -> RolloutBatch:
        """Group advantage of the (penalised) reward, the same for every token of a completion."""
        rewards = rollout.rewards
        kl = sequence_kl(rollout)
        if kl is not None and self.kl_placement == "reward":
            # Before the baseline: an advantage that never sees the KL switches the constraint off.
            rewards = rewards - rollout.kl_coef * kl.sum(dim=-1)
        advantages = group_advantages(
            rewards,
            rollout.group_index,
            rollout.scored_mask,
            baseline=self.baseline,
            scale="group" if self.scale_by_std else "none",
            eps=self.std_eps,
            ddof=self.std_ddof,
        )
        return rollout.replace(advantages=advantages[:, None] * rollout.completion_mask)

    def loss(self, log_probs: Tensor, entropy: Tensor, batch: MicroBatch) -> Tensor:
        """Clipped surrogate, plus KL and entropy where they are part of the loss."""
        rows = batch.rows
        assert rows.advantages is not None
        mask = rows.completion_mask & rows.scored_mask[:, None]
        old = log_probs.detach() if batch.ratio_is_one or rows.old_log_probs is None else rows.old_log_probs
        ratio = importance_ratio(log_probs, old)
        per_token = policy_loss = clipped_policy_loss(ratio, rows.advantages, self.clip_low, self.clip_high)
        if self.kl_placement == "loss" and rows.ref_log_probs is not None:
            per_token = per_token + rows.kl_coef * kl_k3_ratio(log_probs, rows.ref_log_probs, old)
        if self.entropy_coef > 0:
            per_token = per_token - self.entropy_coef * entropy
        loss = aggregate(per_token, mask, batch.denominator, self.loss_aggregation)
        clipped = clipped_tokens(ratio, rows.advantages, self.clip_low, self.clip_high)
        self.iteration_metrics.update(
            {
                "loss": (loss.detach(), batch.last_of_step / self.trainer.world_size),
                "policy/loss": masked_total(policy_loss, mask),
                "policy/entropy": masked_total(entropy, mask),
                "policy/clip_fraction": masked_total(clipped.float(), mask),
                "policy/ratio": masked_total(ratio, mask),
                "policy/advantage_abs": masked_total(rows.advantages.abs(), mask),
            }
        )
        return loss
