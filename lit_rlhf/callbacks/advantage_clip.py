"""Keep a tiny standard deviation from blowing up a group's advantages."""

from __future__ import annotations

import lightning as L
import torch

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import check_number
from lit_rlhf.rollout.batch import RolloutBatch


class AdvantageClip(RolloutCallback):
    """Clip advantages to ``[-advantage_range, advantage_range]``.

    Acts in ``on_advantages_end`` and changes ``advantages`` only; a critic's ``returns`` stay. The largest advantage of
    one completion in a group of ``G`` is ``sqrt(G - 1)`` deviations, so a range of 5 cuts nothing below groups of 27
    unless token rewards, a small ``std_eps`` or a callback add to it. How often it cuts is logged as
    ``policy/advantage_clip_fraction``, a share of the completion tokens of all ranks.

    Args:
        advantage_range: Largest absolute advantage.
    """

    sets = ("advantage range",)

    def __init__(self, advantage_range: float = 5.0) -> None:
        check_number("AdvantageClip: advantage_range", advantage_range, above=0)
        self.advantage_range = advantage_range
        self._clipped: float | None = None

    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> RolloutBatch:
        """Clip, and count what was clipped."""
        assert rollout.advantages is not None
        beyond = (rollout.advantages.abs() > self.advantage_range) & rollout.completion_mask
        counts = torch.stack([beyond.sum(), rollout.completion_mask.sum()]).double()
        clipped, tokens = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        self._clipped = clipped / tokens if tokens else None
        return rollout.replace(advantages=rollout.advantages.clamp(-self.advantage_range, self.advantage_range))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the share."""
        if self._clipped is not None:
            pl_module.iteration_values["policy/advantage_clip_fraction"] = self._clipped  # type: ignore[operator, index]
