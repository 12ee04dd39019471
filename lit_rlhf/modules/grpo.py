r"""GRPO: the completions of one prompt are each other's baseline; no critic.

Source: DeepSeekMath (arXiv 2402.03300). Deviations from the paper, each an option:

* the KL penalty is in the reward by default (the paper puts it in the loss);
* the loss is a mean over the tokens of the optimizer step (the paper: over sequences, then over the batch);
* a group whose task rewards agree has advantage exactly 0, judged before the KL penalty
  (:class:`~lit_rlhf.callbacks.StdThresholdMask`).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lit_rlhf.errors import ConfigurationError, check_number
from lit_rlhf.functional.advantages import BASELINES, Baseline, dead_groups, return_to_go_advantages
from lit_rlhf.functional.gae import reward_to_go
from lit_rlhf.functional.losses import aggregate
from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.models.completions import CompletionOutputs
from lit_rlhf.modules.base import PolicyModule
from lit_rlhf.modules.scoring import outcome_rewards, penalised_token_rewards
from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch


class GRPOModule(PolicyModule):
    """Group Relative Policy Optimization of a Hugging Face causal language model.

    Args:
        policy: Hub name or folder of the model to train; it is the reference, too.
        baseline: Of a group: ``mean``, ``median``, ``leave_one_out`` or ``none``.
        scale_by_std: Divide advantages by the group's standard deviation.
        std_eps: Added to that deviation.
        std_ddof: 0 for the population deviation, 1 for Bessel's correction.
        decomposition: ``sequence`` gives every token the completion's advantage; ``return_to_go`` lets a token answer
            only for step rewards and KL penalties from it on.
        lr: Learning rate after warm-up (1e-6 to 5e-6 for models of billions of parameters).
        options: Of :class:`~lit_rlhf.modules.base.PolicyModule`: ``kl_coef``, ``kl_placement``, ``clip_range``,
            ``loss_aggregation`` and what concerns the model and the optimizer.
    """

    def __init__(
        self,
        policy: str,
        baseline: Baseline = "mean",
        scale_by_std: bool = True,
        std_eps: float = 1e-4,
        std_ddof: int = 0,
        decomposition: Literal["sequence", "return_to_go"] = "sequence",
        lr: float = 2e-6,
        **options: Any,
    ) -> None:
        super().__init__(policy, lr=lr, **options)
        if baseline not in BASELINES:
            raise ConfigurationError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")
        check_number("std_eps", std_eps, minimum=0)
        check_number("std_ddof", std_ddof, minimum=0, maximum=1)
        if decomposition not in ("sequence", "return_to_go"):
            raise ConfigurationError(f"decomposition must be 'sequence' or 'return_to_go', got {decomposition!r}")
        self.baseline: Baseline = baseline
        self.scale_by_std = scale_by_std
        self.std_eps = std_eps
        self.std_ddof = std_ddof
        self.decomposition = decomposition
        self.save_hyperparameters()

    @property
    def uses_group_baseline(self) -> bool:
        """Whether advantages come from comparing the completions of one prompt."""
        return self.baseline != "none" or self.scale_by_std

    def numerics_summary(self) -> str:
        """The choices that make up this objective, in one line."""
        scale = f"divided by std (ddof {self.std_ddof}) + {self.std_eps:g}" if self.scale_by_std else "not scaled"
        credit = "" if self.decomposition == "sequence" else ", return-to-go"
        return f"baseline {self.baseline}, {scale}{credit}; {super().numerics_summary()}"

    def check_data(self, group_size: int) -> None:
        """A group of one has no baseline."""
        if group_size < 2 and self.uses_group_baseline:
            raise ConfigurationError(
                f"GRPO compares the completions of one prompt: group_size must be at least 2, got {group_size}"
            )

    def compute_advantages(self, rollout: RolloutBatch) -> RolloutBatch:
        """Group advantage of the (penalised) reward: one for the completion, or one for what follows each token."""
        mask = rollout.completion_mask
        # Before the baseline: an advantage that never sees the KL switches the constraint off.
        token_rewards = penalised_token_rewards(rollout, kl_in_reward=self.kl_placement == "reward")
        outcome, equal_returns = outcome_rewards(rollout), None
        if self.decomposition == "sequence":
            returns = (outcome + masked_sum(token_rewards, mask, dim=1))[:, None].expand_as(token_rewards)
        else:
            returns = outcome[:, None] + reward_to_go(token_rewards, mask)
            # Judged before the KL penalty, whose noise would be divided by itself.
            equal_returns = dead_groups(rollout.rewards, rollout.group_index, rollout.scored_mask)
        advantages = return_to_go_advantages(
            returns,
            rollout.group_index,
            mask,
            rollout.scored_mask,
            baseline=self.baseline,
            scale="group" if self.scale_by_std else "none",
            eps=self.std_eps,
            ddof=self.std_ddof,
            unscaled=equal_returns,
        )
        return rollout.replace(advantages=advantages)

    def loss(self, outputs: CompletionOutputs, batch: MicroBatch) -> Tensor:
        """Clipped surrogate, plus KL and entropy where they are part of the loss."""
        mask = self.loss_mask(batch.rows)
        per_token, metrics = self.policy_loss(outputs, batch, mask)
        self.iteration_metrics.update(metrics)
        return aggregate(per_token, mask, batch.denominator, self.loss_aggregation)
