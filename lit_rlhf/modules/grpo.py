r"""GRPO: the completions of one prompt are each other's baseline; no critic.

Source: DeepSeekMath (arXiv 2402.03300). Deviations from the paper, each an option:

* the KL penalty is in the reward by default (the paper puts it in the loss);
* the loss is a mean over the tokens of the optimizer step (the paper: over sequences, then over the batch);
* a group whose task rewards agree has advantage exactly 0, judged before the KL penalty
  (:class:`~lit_rlhf.callbacks.StdThresholdMask`).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.functional.advantages import BASELINES, SCALES, Baseline, Scale, dead_groups, return_to_go_advantages
from lit_rlhf.functional.gae import masked_moments, reward_to_go, standardize
from lit_rlhf.functional.losses import aggregate
from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.models.completions import CompletionOutputs
from lit_rlhf.modules.base import PolicyModule
from lit_rlhf.modules.presets import PRESETS, Numerics, choose, complete
from lit_rlhf.modules.scoring import outcome_rewards, penalised_token_rewards, rollout_kl
from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch

Decomposition = Literal["sequence", "return_to_go"]


class GRPOModule(PolicyModule):
    """Group Relative Policy Optimization of a Hugging Face causal language model.

    An option that is not given has the value that ``numerics`` sets, or else its default.

    Args:
        policy: Hub name or folder of the model to train; it is the reference, too.
        numerics: Options of a paper or of another library at once: ``grpo``, ``dr_grpo``, ``dapo``, ``rloo``,
            ``reinforce_pp``, ``gspo``, ``cispo``, ``trl``, ``verl``, ``openrlhf`` or ``open_instruct``
            (:data:`~lit_rlhf.modules.presets.PRESETS`).
        baseline: Of a group: ``mean`` (default), ``median``, ``leave_one_out`` or ``none``.
        advantage_scale: Divide advantages by the standard deviation of the ``group`` (default), by that of the whole
            ``batch`` of rewards, or not at all (``none``).
        scale_by_std: Another way to write it: true is ``group``, false is ``none``.
        std_eps: Added to the deviation, 1e-4 by default.
        std_ddof: 0 (default) for the population deviation, 1 for Bessel's correction.
        decomposition: ``sequence`` (default) gives every token the completion's advantage; ``return_to_go`` lets a
            token answer only for step rewards and KL penalties from it on.
        whiten_advantages: Scale advantages to mean 0 and variance 1 over the tokens of the rollout; off by default.
        mask_truncated: Learn nothing from completions that were cut off; off by default. They stay in their group's
            baseline.
        lr: Learning rate after warm-up (1e-6 to 5e-6 for models of billions of parameters).
        options: Of :class:`~lit_rlhf.modules.objective.PolicyObjective`: the loss, the KL penalty, and what concerns
            the model and the optimizer.
    """

    kl_placements = ("reward", "after", "loss")

    def __init__(
        self,
        policy: str,
        numerics: Numerics | None = None,
        baseline: Baseline | None = None,
        advantage_scale: Scale | None = None,
        scale_by_std: bool | None = None,
        std_eps: float | None = None,
        std_ddof: int | None = None,
        decomposition: Decomposition | None = None,
        whiten_advantages: bool | None = None,
        mask_truncated: bool | None = None,
        lr: float = 2e-6,
        **options: Any,
    ) -> None:
        if scale_by_std is not None and advantage_scale not in (None, "group" if scale_by_std else "none"):
            raise ConfigurationError(
                f"advantage_scale: {advantage_scale} and scale_by_std: {scale_by_std} contradict each other; "
                "leave scale_by_std out"
            )
        if scale_by_std is not None:
            advantage_scale = "group" if scale_by_std else "none"
        chosen = choose(
            numerics,
            {
                "baseline": baseline,
                "advantage_scale": advantage_scale,
                "std_eps": std_eps,
                "std_ddof": std_ddof,
                "decomposition": decomposition,
                "whiten_advantages": whiten_advantages,
                "mask_truncated": mask_truncated,
            },
        )
        options = complete(numerics, options, without=chosen)
        super().__init__(policy, lr=lr, **options)
        check_choice("baseline", chosen["baseline"], BASELINES)
        check_choice("advantage_scale", chosen["advantage_scale"], SCALES)
        check_choice("decomposition", chosen["decomposition"], get_args(Decomposition))
        check_number("std_eps", chosen["std_eps"], minimum=0)
        check_number("std_ddof", chosen["std_ddof"], minimum=0, maximum=1)
        self.numerics = numerics
        self.baseline: Baseline = chosen["baseline"]
        self.advantage_scale: Scale = chosen["advantage_scale"]
        self.std_eps: float = chosen["std_eps"]
        self.std_ddof: int = chosen["std_ddof"]
        self.decomposition: Decomposition = chosen["decomposition"]
        self.whiten_advantages: bool = chosen["whiten_advantages"]
        self.mask_truncated: bool = chosen["mask_truncated"]
        self._check_whitening()
        self.save_hyperparameters()
        self.save_hyperparameters({**self.chosen_options, **chosen})

    def _check_whitening(self) -> None:
        if not self.whiten_advantages:
            return
        if self.advantage_scale != "none":
            raise ConfigurationError(
                f"whiten_advantages divides by a deviation of its own: set advantage_scale: none, "
                f"got {self.advantage_scale!r}"
            )
        if self.kl_placement == "after":
            raise ConfigurationError(
                "kl_placement: after is subtracted from normalised advantages, and whiten_advantages would normalise "
                "the penalty as well: use kl_placement: reward"
            )

    @property
    def uses_group_baseline(self) -> bool:
        """Whether advantages come from comparing the completions of one prompt."""
        return self.baseline != "none" or self.advantage_scale == "group"

    def numerics_summary(self) -> str:
        """The choices that make up this objective, in one line."""
        preset = f"preset {self.numerics} ({PRESETS[self.numerics].source}): " if self.numerics else ""
        divisor = f"divided by std of the {self.advantage_scale} (ddof {self.std_ddof}) + {self.std_eps:g}"
        scale = "not scaled" if self.advantage_scale == "none" else divisor
        credit = "" if self.decomposition == "sequence" else ", return-to-go"
        white = ", whitened" if self.whiten_advantages else ""
        masked = "; truncated completions masked" if self.mask_truncated else ""
        advantage = f"baseline {self.baseline}, {scale}{credit}{white}"
        return f"{preset}{advantage}; {super().numerics_summary()}{masked}"

    def check_data(self, group_size: int) -> None:
        """A group of one has no baseline."""
        if group_size < 2 and self.uses_group_baseline:
            raise ConfigurationError(
                f"GRPO compares the completions of one prompt: group_size must be at least 2, got {group_size}"
            )

    def loss_mask(self, rollout: RolloutBatch) -> Tensor:
        """Tokens of scored rows; with ``mask_truncated`` of those alone that ended by themselves."""
        mask = super().loss_mask(rollout)
        return mask & rollout.finished[:, None] if self.mask_truncated else mask

    def compute_advantages(self, rollout: RolloutBatch) -> RolloutBatch:
        """Group advantage of the (penalised) reward: one for the completion, or one for what follows each token."""
        mask = rollout.completion_mask
        # Before the baseline: an advantage that never sees the KL switches the constraint off.
        token_rewards = penalised_token_rewards(rollout, kl_in_reward=self.kl_placement == "reward")
        outcome, equal_returns = outcome_rewards(rollout), None
        whole = outcome + masked_sum(token_rewards, mask, dim=1)
        if self.decomposition == "sequence":
            returns = whole[:, None].expand_as(token_rewards)
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
            scale=self.advantage_scale,
            eps=self.std_eps,
            ddof=self.std_ddof,
            batch_std=self._batch_std(whole, rollout.scored_mask) if self.advantage_scale == "batch" else None,
            unscaled=equal_returns,
        )
        advantages = advantages + self.ungrouped_advantages(rollout)
        if self.whiten_advantages:
            learned = self.loss_mask(rollout)
            advantages = standardize(advantages, learned, self.sum_over_ranks(masked_moments(advantages, learned)))
        return rollout.replace(advantages=advantages)

    def ungrouped_advantages(self, rollout: RolloutBatch) -> Tensor:
        """The part of the advantages that compares no completions: the KL penalty where it is placed ``after``.

        Args:
            rollout: Scored rows.

        Returns:
            ``(N, T)``, 0 for rows that nobody scored.
        """
        kl = rollout_kl(rollout)
        if kl is None or self.kl_placement != "after":
            return torch.zeros_like(rollout.sampling_log_probs)
        mask = rollout.completion_mask & rollout.scored_mask[:, None]
        to_come = reward_to_go(kl, mask) if self.decomposition == "return_to_go" else kl.sum(dim=1, keepdim=True)
        return torch.where(mask, -rollout.kl_coef * to_come, 0.0)

    def _batch_std(self, returns: Tensor, scored: Tensor) -> Tensor:
        """Deviation of the returns of all ranks; 0 for one alone."""
        count, total, squares = self.sum_over_ranks(masked_moments(returns, scored))
        variance = (squares - total.square() / count.clamp(min=1)) / (count - self.std_ddof).clamp(min=1)
        return variance.clamp(min=0).sqrt()

    def loss(self, outputs: CompletionOutputs, batch: MicroBatch) -> Tensor:
        """Clipped surrogate, plus KL and entropy where they are part of the loss."""
        mask = self.loss_mask(batch.rows)
        per_token, metrics = self.policy_loss(outputs, batch, mask)
        self.iteration_metrics.update(metrics)
        return aggregate(per_token, mask, batch.denominator, self.loss_aggregation)
