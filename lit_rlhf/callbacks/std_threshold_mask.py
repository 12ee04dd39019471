"""Dead groups teach nothing: their advantage is exactly 0."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional.advantages import dead_groups
from lit_rlhf.rollout.batch import RolloutBatch


class StdThresholdMask(RolloutCallback):
    """Set the advantages of groups whose raw task rewards (nearly) agree to 0.

    Acts in ``on_advantages_end`` and changes ``advantages`` only. Dead rows stay in every denominator. It looks at the
    task reward before the KL penalty: with KL in the reward a dead group still has a tiny deviation made of KL noise,
    and dividing by it would turn noise into signal. So the KL penalty in the reward is silent on dead groups; what is
    subtracted after normalising stays.

    Where rows are no groups (one completion per prompt) it does nothing and says so once.

    Args:
        zero_adv_threshold: Largest population standard deviation of a dead group.
    """

    sets = ("std threshold of dead groups",)
    # What the user's own callbacks see and set in on_advantages_end is final.
    runs_first = True

    def __init__(self, zero_adv_threshold: float = 1e-6) -> None:
        if zero_adv_threshold < 0:
            raise ConfigurationError(f"zero_adv_threshold must not be negative, got {zero_adv_threshold}")
        self.zero_adv_threshold = zero_adv_threshold
        self._said = False

    def on_advantages_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Mask dead groups."""
        assert rollout.advantages is not None
        if not getattr(module, "uses_group_baseline", False):
            if not self._said:
                rank_zero_info(f"StdThresholdMask: {type(module).__name__} compares no groups, nothing is masked")
                self._said = True
            return None
        dead = self.dead_rows(module, rollout)[:, None]
        rest: torch.Tensor = torch.zeros((), device=rollout.advantages.device)
        if hasattr(module, "ungrouped_advantages"):
            rest = module.ungrouped_advantages(rollout)  # type: ignore[operator]
        return rollout.replace(advantages=torch.where(dead, rest, rollout.advantages))

    def dead_rows(self, module: L.LightningModule, rollout: RolloutBatch) -> torch.Tensor:
        """Rows of groups that agree, ``(N,)`` bool.

        Args:
            module: Its decomposition decides whether equal sums of unequal step rewards agree.
            rollout: With rewards.
        """
        dead = self._dead(rollout, rollout.rewards)
        if rollout.token_rewards is not None and getattr(module, "decomposition", "sequence") == "return_to_go":
            # Equal sums of unequal steps still tell the tokens apart.
            for step in rollout.token_rewards.unbind(dim=1):
                dead = dead & self._dead(rollout, step)
        return dead

    def _dead(self, rollout: RolloutBatch, rewards: torch.Tensor) -> torch.Tensor:
        return dead_groups(rewards, rollout.group_index, rollout.scored_mask, self.zero_adv_threshold)
