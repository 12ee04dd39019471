"""Rewards of different scale, from several functions, prompts or sources, brought to one."""

from __future__ import annotations

from typing import Literal

import lightning as L
import torch
from torch import Tensor

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import ConfigurationError, RewardError, check_number
from lit_rlhf.functional.standard_scores import standard_scores
from lit_rlhf.rollout.batch import RolloutBatch


class NormalizeRewards(RolloutCallback):
    """Replace rewards by their standard scores: less the mean, over the deviation plus ``eps``.

    Acts in ``on_rollout_end``, before other callbacks, and changes ``rewards`` and ``token_rewards``; what is logged
    as ``reward`` stays as it was given. A row that no function scored keeps no reward. Equal rewards become exactly 0.

    Args:
        over: Which rewards are compared: those of one ``group`` (prompt), of one ``source`` (the value of a dataset
            column), or the whole ``batch``. Sources and batch go over all ranks.
        order: ``normalize_first`` takes the scores of each reward function by itself and then adds them up by weight:
            no function drowns another that has a smaller scale. ``sum_first`` takes the scores of the weighted sum.
        source_column: Dataset column for ``over="source"``.
        eps: Added to the deviation.

    Raises:
        ConfigurationError: An option is not one of those, or there is no such column.
    """

    sets = ("scale of rewards",)
    runs_first = True

    def __init__(
        self,
        over: Literal["group", "batch", "source"] = "group",
        order: Literal["normalize_first", "sum_first"] = "normalize_first",
        source_column: str = "data_source",
        eps: float = 1e-4,
    ) -> None:
        if over not in ("group", "batch", "source"):
            raise ConfigurationError(f"NormalizeRewards: over must be 'group', 'batch' or 'source', got {over!r}")
        if order not in ("normalize_first", "sum_first"):
            raise ConfigurationError(f"NormalizeRewards: order must be 'normalize_first' or 'sum_first', got {order!r}")
        check_number("NormalizeRewards: eps", eps, minimum=0)
        self.over = over
        self.order = order
        self.source_column = source_column
        self.eps = eps
        self._sources: dict[int, int] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Number the sources: the same on every rank, since each has read all prompts."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or self.over != "source":
            return
        prompts = trainer.datamodule.prompts["train"]  # type: ignore[attr-defined]
        if self.source_column not in prompts.columns:
            raise ConfigurationError(
                f"NormalizeRewards: {prompts.name} has no column {self.source_column!r}; columns: "
                f"{', '.join(prompts.columns) or 'none'}. Name the column of the source with source_column"
            )
        names = {prompt.index: str(prompt.columns[self.source_column]) for prompt in prompts.prompts}
        number = {name: place for place, name in enumerate(sorted(set(names.values())))}
        self._sources = {index: number[name] for index, name in names.items()}

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> RolloutBatch:
        """Replace the rewards."""
        weights = trainer.datamodule.scorer.weights  # type: ignore[attr-defined]
        population, populations = self._populations(rollout)
        missing = torch.full_like(rollout.rewards, torch.nan)
        values = torch.where(rollout.scored_mask, rollout.rewards, missing)[:, None]
        if self.order == "normalize_first":
            if rollout.token_rewards is not None:
                raise RewardError(
                    "NormalizeRewards: rewards of single tokens are kept as their sum over functions; use "
                    "order='sum_first' with them"
                )
            values = rollout.reward_components

        def sum_over_ranks(sums: Tensor) -> Tensor:
            if self.over == "group" or trainer.world_size == 1:
                return sums  # a group is on one rank
            return trainer.strategy.reduce(sums, reduce_op="sum")

        scores, divisor = standard_scores(values, population, populations, self.eps, sum_over_ranks)
        scores = scores.nan_to_num(nan=0.0)
        if self.order == "normalize_first":
            rewards = scores.double() @ torch.tensor(weights, dtype=torch.float64, device=scores.device)
            return rollout.replace(rewards=rewards.float(), raw_rewards=rollout.rewards)
        tokens = rollout.token_rewards
        return rollout.replace(
            rewards=scores[:, 0],
            raw_rewards=rollout.rewards,
            token_rewards=None if tokens is None else (tokens.double() / divisor).float(),
        )

    def _populations(self, rollout: RolloutBatch) -> tuple[Tensor, int]:
        """Which rows are compared, ``(N,)`` int64, and how many such sets there are."""
        if self.over == "batch":
            return torch.zeros_like(rollout.group_index), 1
        if self.over == "group":
            groups, place = rollout.group_index.unique(return_inverse=True)
            return place, len(groups)
        rows = [self._sources[index] for index in rollout.prompt_index.tolist()]
        return torch.tensor(rows, device=rollout.group_index.device, dtype=torch.long), max(self._sources.values()) + 1
