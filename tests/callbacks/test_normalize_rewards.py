from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule, RolloutBatch, RolloutDataModule
from lit_rlhf.callbacks import NormalizeRewards, RolloutCallback
from lit_rlhf.errors import ConfigurationError, RewardError


class _Seen(RolloutCallback):
    """Keeps the rollout as it is after the rewards were replaced, and the iteration's values."""

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        self.rollout = rollout

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logged = dict(pl_module.iteration_values)  # type: ignore[arg-type]


def large(completions: list[str], **_: Any) -> list[float]:
    return [100.0 + 50 * place for place in range(len(completions))]


def small(completions: list[str], **_: Any) -> list[float | None]:
    return [None if place == 1 else 0.01 * (place % 2) + 0.001 * place for place in range(len(completions))]


def by_token(completion_ids: list[list[int]]) -> list[list[float]]:
    return [[float(place) for place, _ in enumerate(ids, row)] for row, ids in enumerate(completion_ids)]


def run(
    policy_dir: str,
    make_trainer: Callable[..., L.Trainer],
    rows: list[dict[str, Any]],
    rewards: list[Callable[..., Any]],
    **options: Any,
) -> _Seen:
    seen = _Seen()
    data = RolloutDataModule(
        [{**row, "source": "easy" if place < 2 else "hard"} for place, row in enumerate(rows)],
        rewards=rewards,
        reward_weights=[1.0, 0.5][: len(rewards)],
        prompts_per_iteration=6,
        group_size=4,
        max_new_tokens=4,
        shuffle=False,
    )
    make_trainer(callbacks=[NormalizeRewards(**options), seen]).fit(GRPOModule(policy_dir), data)
    return seen


def scores(values: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    there = values[~values.isnan()].double()
    return ((values.double() - there.mean()) / (there.std(correction=0) + eps)).nan_to_num(0.0)


def populations(rollout: RolloutBatch, over: str) -> list[torch.Tensor]:
    number = {
        "batch": 0 * rollout.group_index,
        "group": rollout.group_index,
        "source": (rollout.prompt_index >= 2).long(),
    }
    return [(number[over] == value).nonzero()[:, 0] for value in number[over].unique()]


@pytest.mark.parametrize("over", ["group", "batch", "source"])
@pytest.mark.parametrize("order", ["normalize_first", "sum_first"])
def test_rewards_become_scores(
    policy_dir: str, make_trainer: Callable[..., L.Trainer], rows: list, over: str, order: str
) -> None:
    seen = run(policy_dir, make_trainer, rows, [large, small], over=over, order=order, source_column="source")
    rollout = seen.rollout
    raw = rollout.reward_components.nan_to_num(0.0) @ torch.tensor([1.0, 0.5])
    torch.testing.assert_close(rollout.task_rewards, raw)
    assert seen.logged["reward"] == pytest.approx(raw.mean().item())
    assert seen.logged["reward/large"] == pytest.approx(rollout.reward_components[:, 0].mean().item())
    for part in populations(rollout, over):
        if order == "sum_first":
            expected = scores(raw[part])
        else:
            columns = rollout.reward_components[part].unbind(dim=1)
            expected = scores(columns[0]) + 0.5 * scores(columns[1])
        torch.testing.assert_close(rollout.rewards[part].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_small_reward_is_heard_beside_a_large_one(
    policy_dir: str, make_trainer: Callable[..., L.Trainer], rows: list
) -> None:
    rollout = run(policy_dir, make_trainer, rows, [large, small], over="batch").rollout
    by_small = rollout.rewards - scores(rollout.reward_components[:, 0])
    assert by_small.std() > 0.4


def test_token_rewards_are_divided_with_their_sum(
    policy_dir: str, make_trainer: Callable[..., L.Trainer], rows: list
) -> None:
    rollout = run(policy_dir, make_trainer, rows, [by_token], over="batch", order="sum_first").rollout
    sums = rollout.task_rewards.double()
    divisor = sums.std(correction=0) + 1e-4
    assert rollout.token_rewards is not None
    torch.testing.assert_close(rollout.token_rewards.sum(dim=1).double(), sums / divisor, check_dtype=False)
    with pytest.raises(RewardError, match="order='sum_first'"):
        run(policy_dir, make_trainer, rows, [by_token], over="batch")


def test_bad_options(policy_dir: str, make_trainer: Callable[..., L.Trainer], rows: list) -> None:
    for options in ({"over": "epoch"}, {"order": "first"}, {"eps": -1.0}):
        with pytest.raises(ConfigurationError, match="NormalizeRewards"):
            NormalizeRewards(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"no column 'data_source'; columns: answer, source"):
        run(policy_dir, make_trainer, rows, [large], over="source")
