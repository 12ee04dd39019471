"""The policy's part of the loss, the same for PPO and GRPO: they differ in the advantages it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.functional.kl import KL_ESTIMATORS, KL_GRADIENTS, KLEstimator, KLGradient, kl_k3, kl_loss
from lit_rlhf.functional.losses import (
    clipped_policy_loss,
    clipped_tokens,
    clipped_weight_loss,
    importance_ratio,
    sequence_ratio,
)
from lit_rlhf.modules.scoring import masked_total

if TYPE_CHECKING:
    from lit_rlhf.models.completions import CompletionOutputs
    from lit_rlhf.rollout.batch import MicroBatch

KLPlacement = Literal["reward", "after", "loss"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "clipped_weight"]

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
    """Surrogate of the advantages, plus KL and entropy where they are part of the loss.

    Args:
        clip_low: The ratio may fall to ``1 - clip_low``.
        clip_high: The ratio may rise to ``1 + clip_high``.
        kl_placement: ``loss`` adds a KL term against the reference.
        entropy_coef: Weight of the entropy bonus.
        ratio: ``token`` or ``sequence``.
        surrogate: ``clip`` or ``clipped_weight``.
        dual_clip: Largest ratio that counts for a negative advantage; 0 is off.
        kl_estimator: Of the KL term.
        kl_gradient: Of the KL term: ``ratio`` weighs the estimator by the importance ratio of its token.
    """

    clip_low: float
    clip_high: float
    kl_placement: KLPlacement
    entropy_coef: float
    ratio: RatioLevel = "token"
    surrogate: Surrogate = "clip"
    dual_clip: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_gradient: KLGradient = "ratio"

    def __post_init__(self) -> None:
        check_number("clip_range", self.clip_low, minimum=0, maximum=1)
        check_number("clip_range_high", self.clip_high, minimum=0)
        check_number("entropy_coef", self.entropy_coef, minimum=0)
        check_number("dual_clip", self.dual_clip, minimum=0)
        check_choice("ratio", self.ratio, get_args(RatioLevel))
        check_choice("surrogate", self.surrogate, get_args(Surrogate))
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_choice("kl_gradient", self.kl_gradient, KL_GRADIENTS)
        if (self.kl_estimator, self.kl_gradient) == ("k1", "plain"):
            raise ConfigurationError(
                "kl_estimator: k1 with kl_gradient: plain has a gradient that does not contain the reference; "
                "use kl_gradient: ratio, or k2 or k3"
            )
        if self.dual_clip and self.surrogate == "clipped_weight":
            raise ConfigurationError(
                f"surrogate: clipped_weight bounds every weight already, dual_clip has nothing to bound: set it to 0, "
                f"got {self.dual_clip:g}"
            )
        if 0 < self.dual_clip <= 1 + self.clip_high:
            raise ConfigurationError(
                f"dual_clip bounds ratios above the clip range: it must exceed {1 + self.clip_high:g}, "
                f"got {self.dual_clip:g} (0 switches it off)"
            )

    def summary(self) -> str:
        """The surrogate, in a few words."""
        level = "sequence ratio, " if self.ratio == "sequence" else ""
        what = "clip" if self.surrogate == "clip" else "clipped weight"
        dual = f", dual clip {self.dual_clip:g}" if self.dual_clip else ""
        return f"{level}{what} [{1 - self.clip_low:g}, {1 + self.clip_high:g}]{dual}"

    def kl_summary(self) -> str:
        """Where the KL penalty is, and what it is there, in a few words."""
        if self.kl_placement == "loss":
            return f"in the loss ({self.kl_estimator}, {self.kl_gradient})"
        return "in the reward" if self.kl_placement == "reward" else "subtracted after normalising"

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
        ratio = sequence_ratio(log_probs, old, mask) if self.ratio == "sequence" else importance_ratio(log_probs, old)
        surrogate, clipped = self._surrogate(ratio, log_probs, rows.advantages)
        if rows.loss_weights is not None:
            surrogate = surrogate * rows.loss_weights
        per_token = surrogate
        if self.kl_placement == "loss" and rows.ref_log_probs is not None:
            divergence = kl_loss(log_probs, rows.ref_log_probs, old, self.kl_estimator, self.kl_gradient)
            per_token = per_token + rows.kl_coef * divergence
        if self.entropy_coef > 0:
            per_token = per_token - self.entropy_coef * outputs.entropy
        return per_token, {
            "policy/loss": masked_total(surrogate, mask),
            "policy/entropy": masked_total(outputs.entropy, mask),
            "policy/clip_fraction": masked_total(clipped.float(), mask),
            "policy/ratio": masked_total(ratio, mask),
            "policy/old_kl": masked_total(kl_k3(old, log_probs.detach()), mask),
            "policy/advantage_abs": masked_total(rows.advantages.abs(), mask),
        }

    def _surrogate(self, ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """``(N, T)`` loss, and ``(N, T)`` bool: tokens that the clip touched."""
        low, high = self.clip_low, self.clip_high
        if self.surrogate == "clipped_weight":
            outside = (ratio < 1 - low) | (ratio > 1 + high)
            return clipped_weight_loss(ratio, log_probs, advantages, low, high), outside & (advantages != 0)
        return (
            clipped_policy_loss(ratio, advantages, low, high, self.dual_clip),
            clipped_tokens(ratio, advantages, low, high, self.dual_clip),
        )
