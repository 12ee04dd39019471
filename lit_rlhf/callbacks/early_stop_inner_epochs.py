"""Stop learning from a rollout once the policy has moved far enough away from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import check_number

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import MicroBatch


class EarlyStopInnerEpochs(RolloutCallback):
    """Skip the rest of an iteration once the policy is ``target_kl`` away from the one that sampled its rollout.

    Acts in ``on_before_optimizer_step``. There it measures ``policy/old_kl``, KL(rollout policy ‖ policy now) in nats
    per token (k3, over the tokens of this optimizer step and all ranks), and above the target discards the gradients of
    this step and of all that follow in the iteration: neither weights nor optimizer state move, PPO's critic
    included. The micro-batches that are left are replaced by empty ones.

    Skipped steps still count in ``global_step``, so an iteration always has the same number of them: the learning-rate
    schedule, ``max_steps`` and checkpoints at the end of an iteration are as without this callback, which has no state
    of its own. ``policy/early_stopped_steps`` is the share of steps that were skipped.

    Args:
        target_kl: In nats per token; 0.01 to 0.05 is usual. The first step of an iteration, where the KL is 0, is
            always taken.
    """

    sets = ("target KL of an iteration",)

    def __init__(self, target_kl: float) -> None:
        check_number("EarlyStopInnerEpochs: target_kl", target_kl, above=0)
        self.target_kl = target_kl
        self._begin()

    def _begin(self) -> None:
        self._measured = torch.zeros(2, dtype=torch.float64)
        self._step = 0
        self._steps = self._skipped = 0
        self._stopped = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Say where it has nothing to do."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.datamodule.optimizer_steps_per_iteration == 1:  # type: ignore[attr-defined]
            rank_zero_info("EarlyStopInnerEpochs: an iteration has one optimizer step, there is nothing to stop")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: MicroBatch, batch_idx: int
    ) -> None:
        """Begin anew with each iteration."""
        if batch_idx == 0:
            self._begin()
        self._step = batch.step

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Measure; above the target no step is taken, now or later in the iteration."""
        self._steps += 1
        if not self._stopped:
            so_far = pl_module.iteration_metrics.so_far("policy/old_kl")  # type: ignore[operator,union-attr]
            of_this_step = so_far - self._measured.to(so_far)
            self._measured = so_far
            kl, tokens = trainer.strategy.reduce(of_this_step, reduce_op="sum").tolist()
            # Written so that NaN, of a policy that has diverged, stops too.
            self._stopped = tokens > 0 and not kl / tokens <= self.target_kl
            if self._stopped:
                trainer.train_dataloader.dataset.skip_after(self._step)  # type: ignore[union-attr]
        if self._stopped:
            self._skipped += 1
            optimizer.zero_grad(set_to_none=True)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the share of skipped steps."""
        if self._steps:
            pl_module.iteration_values["policy/early_stopped_steps"] = self._skipped / self._steps  # type: ignore[operator, index]
