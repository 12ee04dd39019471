"""The policy's part of the loss, the same for PPO and GRPO: they differ in the advantages it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from lit_rlhf.errors import check_number
from lit_rlhf.functional.kl import kl_k3, kl_k3_ratio
from lit_rlhf.functional.losses import clipped_policy_loss, clipped_tokens, importance_ratio
from lit_rlhf.modules.scoring import masked_total

if TYPE_CHECKING:
    from lit_rlhf.models.completions import CompletionOutputs
    from lit_rlhf.rollout.batch import MicroBatch

KLPlacement = Literal["reward", "loss"]

POLICY_MEANS = (
    "loss",
    "policy/loss",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/ratio",
    "policy/old_kl",
    "policy/advantage_abs",
)


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped surrogate, plus KL and entropy where they are part of the loss.

    Args:
        clip_low: The ratio may fall to ``1 - clip_low``.
        clip_high: The ratio may rise to ``1 + clip_high``.
        kl_placement: ``loss`` adds the ratio-weighted k3 against the reference.
        entropy_coef: Weight of the entropy bonus.
    """

    clip_low: float
    clip_high: float
    kl_placement: KLPlacement
    entropy_coef: float

    def __post_init__(self) -> None:
        check_number("clip_range", self.clip_low, minimum=0, below=1)
        check_number("clip_range_high", self.clip_high, minimum=0)

    def __call__(
        self, outputs: CompletionOutputs, batch: MicroBatch, mask: Tensor
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Loss of each token, and sums and counts for the log.

        Args:
            outputs: Log-probs and entropies of the policy, with a graph.
            batch: Rows with advantages.
            mask: ``(N, T)`` tokens that are learned from.

        Returns:
            ``(N, T)`` and sum and count by name.
        """
        rows, log_probs = batch.rows, outputs.log_probs
        assert rows.advantages is not None
        assert outputs.entropy is not None
        old = log_probs.detach() if batch.ratio_is_one or rows.old_log_probs is None else rows.old_log_probs
        ratio = importance_ratio(log_probs, old)
        surrogate = clipped_policy_loss(ratio, rows.advantages, self.clip_low, self.clip_high)
        per_token = surrogate
        if self.kl_placement == "loss" and rows.ref_log_probs is not None:
            per_token = per_token + rows.kl_coef * kl_k3_ratio(log_probs, rows.ref_log_probs, old)
        if self.entropy_coef > 0:
            per_token = per_token - self.entropy_coef * outputs.entropy
        clipped = clipped_tokens(ratio, rows.advantages, self.clip_low, self.clip_high)
        return per_token, {
            "policy/loss": masked_total(surrogate, mask),
            "policy/entropy": masked_total(outputs.entropy, mask),
            "policy/clip_fraction": masked_total(clipped.float(), mask),
            "policy/ratio": masked_total(ratio, mask),
            "policy/old_kl": masked_total(kl_k3(old, log_probs.detach()), mask),
            "policy/advantage_abs": masked_total(rows.advantages.abs(), mask),
        }
