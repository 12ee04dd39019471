"""A run ends when it has generated so many tokens, not after so many iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import check_number

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch
    from lit_rlhf.rollout.datamodule import RolloutDataModule


class TokenBudget(RolloutCallback):
    """End the run with the iteration in which it has generated ``tokens`` completion tokens, over all ranks.

    Runs with other group sizes or algorithms are then compared at equal cost of sampling. Nothing is cut: a run ends
    less than one iteration beyond its budget. The last iteration is validated whatever ``check_val_every_n_epoch``
    says. ``max_epochs`` may be -1, and :class:`~lit_rlhf.callbacks.WarmupCosine` then reaches its end with the budget.

    Acts in ``on_advantages_end``, ``on_train_batch_start`` and ``on_train_epoch_end``; the count is part of the
    checkpoint. Tokens that :class:`~lit_rlhf.callbacks.DynamicSampling` drew and threw away count.

    Args:
        tokens: Completion tokens that may be generated before another iteration is begun.
    """

    runs_last = True
    sets = ("token budget",)

    def __init__(self, tokens: int) -> None:
        check_number("TokenBudget: tokens", tokens, minimum=1)
        self.tokens = tokens
        self.generated = 0
        """Tokens of all iterations that have ended."""
        self._drawn = 0  # of the iteration that is going on
        self._first_step = 0  # the optimizer step that it begins with
        self._validates_every: int | None = None

    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        """Count what the iteration has generated."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        own = torch.tensor(data.sampled_tokens, dtype=torch.int64, device=trainer.strategy.root_device)
        self._drawn = int(trainer.strategy.reduce(own, reduce_op="sum"))
        self._first_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let the iteration that reaches the budget be the last one, and be validated."""
        if self.generated + self._drawn >= self.tokens and self._validates_every is None:
            trainer.should_stop = True  # the module waits with it for the end of the iteration
            self._validates_every = trainer.check_val_every_n_epoch
            trainer.check_val_every_n_epoch = 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add up."""
        self.generated, self._drawn = self.generated + self._drawn, 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the Trainer's option back."""
        if self._validates_every is not None:
            trainer.check_val_every_n_epoch, self._validates_every = self._validates_every, None

    def progress(self, trainer: L.Trainer) -> tuple[float, float]:
        """Optimizer steps done, and in the whole run, if all iterations were as long as the one that is going on.

        Args:
            trainer: Knows the optimizer steps.
        """
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        per_step = self._drawn / data.optimizer_steps_per_iteration
        if per_step == 0:  # between two iterations
            return 0.0, 1.0
        return self.generated / per_step + trainer.global_step - self._first_step, max(self.tokens / per_step, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The count: a checkpoint is written when its iteration is over, maybe before this callback has added it up."""
        return {"generated": self.generated + self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from there."""
        self.generated = int(state_dict["generated"])
