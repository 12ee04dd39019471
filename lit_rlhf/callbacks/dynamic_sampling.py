"""Groups whose rewards agree teach nothing: draw others in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.callbacks.std_threshold_mask import StdThresholdMask
from lit_rlhf.errors import ConfigurationError, check_number

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch
    from lit_rlhf.rollout.datamodule import RolloutDataModule

ReplaceWith = Literal["new_prompt", "same_prompt", "nothing"]


class DynamicSampling(RolloutCallback):
    """Throw dead groups away and draw others in their place, within a budget of tokens.

    Acts in ``on_rewards_end``, after all other callbacks, and changes which rows the rollout has. A group is dead where
    :class:`~lit_rlhf.callbacks.StdThresholdMask` would silence it. Groups that the budget does not replace are left
    out: the iteration goes on with fewer, and its loss denominators count what is left. New completions pass through
    ``on_rewards_end`` of the other callbacks, too. They are spread over the ranks, and depend on seed and iteration
    alone: any number of ranks and a resumed run draw the same.

    What was thrown away is logged: ``group/dead``, ``group/redrawn`` and ``group/kept`` of the iteration, and
    ``tokens/discarded`` of the run, which is part of the checkpoint. ``group/effective_ratio`` and ``reward`` are of
    the groups that were kept: compare runs by ``val/``, over ``tokens/generated``, which counts everything sampled.

    Where rows are no groups (PPO) it does nothing and says so once.

    Source: DAPO (arXiv 2503.14476), section 3.2, which redraws without a budget.

    Args:
        replace_with: Complete a ``new_prompt``, the ``same_prompt`` again, or replace a dead group with ``nothing``.
        token_budget: Completion tokens, over all ranks, that redrawing may cost in one iteration. It is never exceeded:
            no more groups are drawn than would fit at full length. By default as many as the iteration's own
            completions may cost.
        max_attempts: Times that an iteration draws again.
    """

    runs_last = True
    sets = ("fate of dead groups",)

    def __init__(
        self, replace_with: ReplaceWith = "new_prompt", token_budget: int | None = None, max_attempts: int = 4
    ) -> None:
        if replace_with not in ("new_prompt", "same_prompt", "nothing"):
            raise ConfigurationError(
                f"DynamicSampling: replace_with must be 'new_prompt', 'same_prompt' or 'nothing', got {replace_with!r}"
            )
        check_number("DynamicSampling: token_budget", token_budget, minimum=1)
        check_number("DynamicSampling: max_attempts", max_attempts, minimum=1)
        self.replace_with = replace_with
        self.token_budget = token_budget
        self.max_attempts = max_attempts
        self.discarded_tokens = 0
        self._found: dict[str, float] = {}
        self._said = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """A budget that no group fits into is a mistake."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.discarded_tokens, self._found = 0, {}
        if self.replace_with == "nothing":
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        group_cost = _group_cost(data)
        if self.token_budget is not None and self.token_budget < group_cost:
            raise ConfigurationError(
                f"DynamicSampling: token_budget={self.token_budget} does not pay for one group, which may cost "
                f"{group_cost} tokens (group_size={data.group_size} x max_new_tokens={data.sampling.max_new_tokens})"
            )

    def on_rewards_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Drop dead groups; draw, score and judge others until all are alive or the budget is spent."""
        if not getattr(module, "uses_group_baseline", False):
            if not self._said:
                rank_zero_info(f"DynamicSampling: {type(module).__name__} compares no groups, nothing is drawn again")
                self._said = True
            return None
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        assert data.sampler is not None
        drawn = data.sampler.draw(data.iteration)
        used, budget = set(drawn), self._budget(data)
        kept, empty_places, discarded = _sort_out(trainer, rollout)
        num_dead, num_redrawn = len(empty_places), 0
        for attempt in range(1, self.max_attempts + 1):
            affordable = empty_places[: budget // _group_cost(data)]
            if affordable and self.replace_with == "new_prompt":
                prompts = data.sampler.draw_more(data.iteration, attempt, len(affordable), used)
                used.update(prompts)
            else:
                prompts = [drawn[place] for place in affordable]
            if not prompts:
                break
            redrawn, cost = _draw(trainer, prompts, empty_places[: len(prompts)], attempt)
            alive, still_dead, thrown_away = _sort_out(trainer, redrawn)
            kept = kept.join(alive)
            # Behind those that had no turn yet: a hopeless prompt does not eat the whole budget.
            empty_places = empty_places[len(prompts) :] + still_dead
            budget, discarded = budget - cost, discarded + thrown_away
            num_dead, num_redrawn = num_dead + len(still_dead), num_redrawn + len(prompts)
        self.discarded_tokens += discarded
        self._found = {
            "group/dead": num_dead,
            "group/redrawn": num_redrawn,
            "group/kept": len(_places(trainer, kept.group_index)) / max(1, len(drawn)),
            "tokens/discarded": self.discarded_tokens,
        }
        return kept

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what was thrown away."""
        found = {name: float(value) for name, value in self._found.items()}
        pl_module.iteration_values.update(found)  # type: ignore[operator, union-attr]
        self._found = {}

    def state_dict(self) -> dict[str, Any]:
        """Tokens thrown away so far."""
        return {"discarded_tokens": self.discarded_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on."""
        self.discarded_tokens = state_dict["discarded_tokens"]

    def _budget(self, data: RolloutDataModule) -> int:
        if self.replace_with == "nothing":
            return 0
        return self.token_budget or data.prompts_per_iteration * _group_cost(data)


def _group_cost(data: RolloutDataModule) -> int:
    """Most tokens that the completions of one prompt can have."""
    return data.group_size * data.sampling.max_new_tokens


def _draw(trainer: L.Trainer, prompts: list[int], places: list[int], attempt: int) -> tuple[RolloutBatch, int]:
    """This rank's share of new groups, and the completion tokens that all of them cost."""
    from lit_rlhf.rollout.generation import REDRAW_STREAM
    from lit_rlhf.rollout.pipeline import draw_groups  # which imports the callbacks

    data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
    mine = slice(trainer.global_rank, None, trainer.world_size)
    before = data.sampled_tokens
    redrawn = draw_groups(data, trainer, data.iteration, prompts[mine], places[mine], REDRAW_STREAM + attempt)
    return redrawn, _sum(trainer, data.sampled_tokens - before)


def _sort_out(trainer: L.Trainer, rollout: RolloutBatch) -> tuple[RolloutBatch, list[int], int]:
    """This rank's living rows; the places of dead groups and the tokens of their completions, of all ranks."""
    masks = [c for c in trainer.callbacks if isinstance(c, StdThresholdMask)]  # type: ignore[attr-defined]
    dead = (masks or [StdThresholdMask()])[0].dead_rows(trainer.lightning_module, rollout)
    tokens = _sum(trainer, int(rollout.completion_lengths[dead].sum()))
    return rollout.select(~dead), _places(trainer, rollout.group_index[dead]), tokens


def _places(trainer: L.Trainer, group_index: Tensor) -> list[int]:
    """The group numbers that occur on any rank, in order."""
    flags = torch.zeros(trainer.datamodule.drawn_prompts, device=group_index.device)  # type: ignore[attr-defined]
    flags[group_index] = 1.0
    return trainer.strategy.reduce(flags, reduce_op="sum").nonzero()[:, 0].tolist()


def _sum(trainer: L.Trainer, value: int) -> int:
    """Over the ranks."""
    count = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(count, reduce_op="sum"))
