"""What a policy is trained to do: which tokens count, and with which loss. The same for PPO and GRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.functional.importance import (
    SAMPLING_CORRECTIONS,
    SamplingCorrection,
    sampling_weights,
    top_entropy_threshold,
)
from lit_rlhf.functional.kl import KLEstimator, KLGradient
from lit_rlhf.functional.losses import AGGREGATIONS, Aggregation, loss_denominator
from lit_rlhf.models.forward import completion_outputs
from lit_rlhf.modules.policy_loss import KLPlacement, PolicyLoss, RatioLevel, Surrogate
from lit_rlhf.modules.presets import choose
from lit_rlhf.modules.scored_policy import ScoredPolicy
from lit_rlhf.modules.scoring import by_parts, masked_total

if TYPE_CHECKING:
    from lit_rlhf.functional.vocabulary import EntropyMode
    from lit_rlhf.metrics.iteration import IterationMetrics
    from lit_rlhf.rollout.batch import RolloutBatch

WEIGHT_MEANS = ("sampling/weight", "sampling/weight_outside", "policy/entropy_threshold")


class PolicyObjective(ScoredPolicy):
    """A scored policy and its objective. An option that is not given has the value of its default, or of a preset.

    Args:
        policy: Hub name or folder of the model to train; it is the reference, too.
        kl_coef: Weight of the KL penalty against the reference (useful range 0.01 to 0.1), 0.04 by default. At 0 no
            reference is loaded.
        kl_placement: ``reward`` (default) subtracts the penalty from the reward, ``loss`` adds it to the loss, and
            ``after`` subtracts it from GRPO's normalised advantages. A run must be resumed with the placement it was
            started with.
        kl_estimator: In the loss: ``k1``, ``k2`` or ``k3`` (default). Elsewhere it is always ``k1``.
        kl_gradient: In the loss: ``ratio`` (default) has the exact KL's gradient; ``plain`` is the estimator alone.
        ratio: The importance ratio of a ``token`` (default), or one for the whole ``sequence``.
        surrogate: ``clip`` (default) silences tokens out of the clip range, ``clipped_weight`` bounds their weight.
        clip_range: The importance ratio may fall to ``1 - clip_range`` and rise to ``1 + clip_range``; 0.2 by default.
        clip_range_high: Another upper range, if given.
        dual_clip: Largest ratio that counts for a negative advantage, above ``1 + clip_range_high``; 0 (default) is
            off.
        loss_aggregation: ``token_mean`` (default), ``sequence_mean``, ``sequence_sum`` or ``constant`` (rows times
            ``max_new_tokens``), each over the whole optimizer step.
        entropy_coef: Weight of an entropy bonus.
        top_entropy_share: Learn only from this share of the rollout's tokens, those with the highest entropy; 1
            (default) is all. Costs one more pass over the rollout.
        sampling_correction: Weigh tokens by what the policy and the engine think of them, ``token_truncate``,
            ``token_mask``, ``sequence_truncate`` or ``sequence_mask``; ``off`` by default.
        sampling_weight_min: Smallest of these weights, 0 by default.
        sampling_weight_max: Largest of these weights, 2 by default.
        options: Of :class:`~lit_rlhf.modules.causal_lm.CausalLMModule`: what concerns the model and the optimizer.
    """

    iteration_metrics: IterationMetrics

    def __init__(
        self,
        policy: str,
        kl_coef: float | None = None,
        kl_placement: KLPlacement | None = None,
        kl_estimator: KLEstimator | None = None,
        kl_gradient: KLGradient | None = None,
        ratio: RatioLevel | None = None,
        surrogate: Surrogate | None = None,
        clip_range: float | None = None,
        clip_range_high: float | None = None,
        dual_clip: float | None = None,
        loss_aggregation: Aggregation | None = None,
        entropy_coef: float = 0.0,
        top_entropy_share: float | None = None,
        sampling_correction: SamplingCorrection | None = None,
        sampling_weight_min: float | None = None,
        sampling_weight_max: float | None = None,
        **options: Any,
    ) -> None:
        chosen = choose(
            None,
            {
                "kl_coef": kl_coef,
                "kl_placement": kl_placement,
                "kl_estimator": kl_estimator,
                "kl_gradient": kl_gradient,
                "ratio": ratio,
                "surrogate": surrogate,
                "clip_range": clip_range,
                "clip_range_high": clip_range_high,
                "dual_clip": dual_clip,
                "loss_aggregation": loss_aggregation,
                "top_entropy_share": top_entropy_share,
                "sampling_correction": sampling_correction,
            },
        )
        super().__init__(policy, chosen["kl_coef"], chosen["kl_placement"], **options)
        if self.kl_placement != "loss" and (kl_estimator is not None or kl_gradient is not None):
            raise ConfigurationError(
                f"kl_estimator and kl_gradient are of a KL term in the loss, but kl_placement is "
                f"{self.kl_placement!r}, where the penalty is the constant k1: leave them out or set kl_placement: loss"
            )
        high = chosen["clip_range"] if chosen["clip_range_high"] is None else chosen["clip_range_high"]
        self.policy_loss = PolicyLoss(
            clip_low=chosen["clip_range"],
            clip_high=high,
            kl_placement=self.kl_placement,
            entropy_coef=entropy_coef,
            **{name: chosen[name] for name in ("ratio", "surrogate", "dual_clip", "kl_estimator", "kl_gradient")},
        )
        check_number("top_entropy_share", chosen["top_entropy_share"], above=0, maximum=1)
        check_choice("loss_aggregation", chosen["loss_aggregation"], AGGREGATIONS)
        self._set_correction(chosen["sampling_correction"], sampling_weight_min, sampling_weight_max)
        if self.kl_placement != "loss":
            chosen.update(kl_estimator=None, kl_gradient=None)
        if self.sampling_correction != "off":
            chosen.update(sampling_weight_min=self.sampling_weight_min, sampling_weight_max=self.sampling_weight_max)
        self.loss_aggregation: Aggregation = chosen["loss_aggregation"]
        self.entropy_coef = entropy_coef
        self.top_entropy_share: float = chosen["top_entropy_share"]
        # What the hyperparameters show: the values that are in force, none where an option has no effect.
        self.chosen_options = chosen

    def _set_correction(self, correction: SamplingCorrection, low: float | None, high: float | None) -> None:
        check_choice("sampling_correction", correction, SAMPLING_CORRECTIONS)
        if correction == "off" and (low is not None or high is not None):
            raise ConfigurationError(
                "sampling_weight_min and sampling_weight_max bound the weights of sampling_correction, which is off"
            )
        self.sampling_correction: SamplingCorrection = correction
        self.sampling_weight_min = 0.0 if low is None else low
        self.sampling_weight_max = 2.0 if high is None else high
        check_number("sampling_weight_min", self.sampling_weight_min, minimum=0, maximum=1)
        check_number("sampling_weight_max", self.sampling_weight_max, minimum=1)

    def numerics_summary(self) -> str:
        """The choices that make up this objective, in one line."""
        parts = [self.policy_loss.summary(), self.loss_aggregation]
        if self.kl_coef:
            parts.append(f"KL {self.policy_loss.kl_summary()}, coefficient {self.kl_coef:g}")
        else:
            parts.append("no KL penalty")
        if self.entropy_coef:
            parts.append(f"entropy bonus {self.entropy_coef:g}")
        if self.top_entropy_share < 1:
            parts.append(f"top {self.top_entropy_share:.0%} of tokens by entropy")
        if self.sampling_correction != "off":
            bounds = f"[{self.sampling_weight_min:g}, {self.sampling_weight_max:g}]"
            parts.append(f"sampling weights {self.sampling_correction} {bounds}")
        return "; ".join(parts)

    @property
    def entropy_mode(self) -> EntropyMode:
        """Entropy is always logged; it needs a graph where it is part of the loss."""
        return "train" if self.entropy_coef > 0 else "detached"

    def loss_mask(self, rollout: RolloutBatch) -> Tensor:
        """Tokens that are learned from: rows that nobody scored are not.

        Args:
            rollout: ``N`` rows.

        Returns:
            ``(N, T)`` bool.
        """
        return rollout.completion_mask & rollout.scored_mask[:, None]

    def live_rows(self, rollout: RolloutBatch) -> Tensor:
        """Rows with something to teach: a token with an advantage, or a term of the loss that needs none.

        Args:
            rollout: With advantages.

        Returns:
            ``(N,)`` bool.
        """
        assert rollout.advantages is not None
        taught = self.loss_mask(rollout)
        if self.entropy_coef == 0 and not (self.kl_placement == "loss" and rollout.kl_coef > 0):
            taught = taught & (rollout.advantages != 0)
            if rollout.loss_weights is not None:
                taught = taught & (rollout.loss_weights != 0)
        return taught.any(dim=-1)

    def loss_denominator(self, rollout: RolloutBatch, max_new_tokens: int) -> float:
        """This rank's share of an optimizer step's loss denominator; ``constant`` counts unscored rows too.

        Args:
            rollout: Rows of the step.
            max_new_tokens: The sampling limit.
        """
        return loss_denominator(self.loss_mask(rollout), self.loss_aggregation, max_new_tokens)

    # Weights that are fixed before the first step

    def score_rollout(self, rollout: RolloutBatch, parts: list[list[int]], ratio_is_one: bool) -> RolloutBatch:
        """Log-probs, and weights of the tokens where not all weigh the same."""
        # The correction compares the engine with the policy also where the ratio needs no old log-probs.
        rollout = super().score_rollout(rollout, parts, ratio_is_one and self.sampling_correction == "off")
        weights: Tensor | None = None
        if self.sampling_correction != "off":
            weights = self._sampling_weights(rollout)
        if self.top_entropy_share < 1:
            kept = self._top_entropy_tokens(rollout, parts)
            weights = kept.float() if weights is None else torch.where(kept, weights, 0.0)
        return rollout.replace(loss_weights=weights)

    def _sampling_weights(self, rollout: RolloutBatch) -> Tensor:
        assert rollout.old_log_probs is not None
        mask = rollout.completion_mask
        weights, outside = sampling_weights(
            rollout.old_log_probs,
            rollout.sampling_log_probs,
            mask,
            self.sampling_correction,
            self.sampling_weight_min,
            self.sampling_weight_max,
        )
        means = {"sampling/weight": weights, "sampling/weight_outside": outside.float()}
        self.iteration_metrics.update({name: masked_total(values, mask) for name, values in means.items()})
        return weights

    def _top_entropy_tokens(self, rollout: RolloutBatch, parts: list[list[int]]) -> Tensor:
        """``(N, T)`` bool; the threshold is one for all ranks, steps and micro-batches of the rollout."""
        mask = self.loss_mask(rollout)
        entropies = by_parts(rollout, parts, self._entropies)
        threshold = top_entropy_threshold(self._of_all_ranks(entropies[mask]), self.top_entropy_share)
        if threshold < float("inf"):
            self.iteration_metrics.update({"policy/entropy_threshold": (threshold, 1)})
        return mask & (entropies >= threshold)

    def _entropies(self, rows: RolloutBatch) -> Tensor:
        assert self.policy is not None
        entropy = completion_outputs(self.policy, rows, rows.temperature, "detached").entropy
        assert entropy is not None
        return entropy

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        """``(M,)`` values of each rank, one after the other; ranks may have different numbers of them."""
        strategy = self.trainer.strategy
        most = int(strategy.reduce(torch.tensor(float(len(values)), device=values.device), reduce_op="max"))
        padded = torch.nn.functional.pad(values, (0, most - len(values)), value=torch.nan)
        gathered = strategy.all_gather(padded).flatten()
        return gathered[~gathered.isnan()]

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Sums of this rank, added up over all of them.

        Args:
            sums: Of the same shape on every rank.
        """
        return sums if self._trainer is None else self.trainer.strategy.reduce(sums, reduce_op="sum")
