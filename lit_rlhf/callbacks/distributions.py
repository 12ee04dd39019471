"""Histograms of what an iteration's log shows the mean of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import check_number
from lit_rlhf.functional.advantages import group_std

if TYPE_CHECKING:
    from torch import Tensor

    from lit_rlhf.rollout.batch import RolloutBatch


class Distributions(RolloutCallback):
    """Write histograms of rewards, of their deviation inside each group and of completion lengths to TensorBoard.

    Acts in ``on_advantages_end`` and changes nothing. Each has the name of the scalar that is its mean: ``reward``,
    ``group/reward_std``, ``completion/length``. They show the first rank's completions. Without a TensorBoardLogger it
    does nothing.

    Args:
        every_n_iterations: How often.
    """

    def __init__(self, every_n_iterations: int = 5) -> None:
        check_number("Distributions: every_n_iterations", every_n_iterations, minimum=1)
        self.every_n_iterations = every_n_iterations

    @rank_zero_only
    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        """Write them, now and then."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not loggers or trainer.datamodule.iteration % self.every_n_iterations:  # type: ignore[attr-defined]
            return
        for name, values in histograms(rollout).items():
            for logger in loggers:
                logger.experiment.add_histogram(name, values, global_step=trainer.global_step)


def histograms(rollout: RolloutBatch) -> dict[str, Tensor]:
    """Values by the name of their histogram; an empty one is left out.

    Args:
        rollout: With rewards.
    """
    scored, group = rollout.scored_mask, rollout.group_index
    deviations = group_std(rollout.rewards, group, scored)
    by_group = dict(zip(group.tolist(), deviations.tolist(), strict=True))
    values = {
        "reward": rollout.task_rewards[scored],
        "group/reward_std": deviations.new_tensor(list(by_group.values())),
        "completion/length": rollout.completion_lengths,
    }
    return {name: value for name, value in values.items() if len(value)}
