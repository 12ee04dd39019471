from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule, RolloutBatch


@pytest.fixture
def make_hand_made() -> Callable[..., RolloutBatch]:
    """Rows of three tokens with the given rewards and groups; row i has advantage i + 1."""

    def make(rewards: list[float], groups: list[int]) -> RolloutBatch:
        n = len(rewards)
        ones = torch.ones(n, 3, dtype=torch.long)
        return RolloutBatch(
            prompt_ids=ones,
            prompt_lengths=torch.full((n,), 3),
            completion_ids=ones,
            completion_lengths=torch.full((n,), 3),
            completion_mask=ones.bool(),
            finished=torch.ones(n, dtype=torch.bool),
            group_index=torch.tensor(groups),
            prompt_index=torch.tensor(groups),
            sampling_log_probs=torch.zeros(n, 3),
            rewards=torch.tensor(rewards),
            scored_mask=torch.ones(n, dtype=torch.bool),
            reward_components=torch.tensor(rewards)[:, None],
            outcome_mask=torch.ones(len(rewards), dtype=torch.bool),
            prompts=("p",) * n,
            completions=("c",) * n,
            advantages=(torch.arange(n) + 1.0)[:, None].expand(n, 3).clone(),
        )

    return make


class States(ModelCheckpoint):
    """A checkpoint of every iteration, and what each iteration logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True
        )
        self.logged: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        slow = ("time/", "memory/")
        self.logged.append(
            {name: value for name, value in metrics.items() if not name.startswith(slow) and "per_second" not in name}
        )


@pytest.fixture
def resumed_equals_uninterrupted(
    make_trainer: Any, policy_dir: str, tmp_path: Path, weights: Any
) -> Callable[..., tuple[list[dict[str, float]], Any]]:
    """Run once, run again from the checkpoint of an iteration, and compare metrics, weights and callback states.

    Gives what each iteration of the whole run logged, and the folder of its checkpoints.
    """

    def check(
        make_callbacks: Callable[[], list[Any]], make_data: Callable[[], Any], **module: Any
    ) -> tuple[list[dict[str, float]], Any]:
        def run(folder: Path, ckpt: Path | None = None) -> tuple[States, Any, dict[str, Any]]:
            states = States(folder)
            policy = GRPOModule(policy_dir, **{"lr": 3e-3, **module})
            options = {"callbacks": [*make_callbacks(), states], "max_epochs": 5, "enable_checkpointing": True}
            make_trainer(**options).fit(policy, make_data(), ckpt_path=ckpt)
            return states, policy, torch.load(folder / "epoch=4.ckpt", weights_only=True)["callbacks"]

        whole, policy, state = run(tmp_path / "whole")
        again, resumed, other = run(tmp_path / "again", tmp_path / "whole" / "epoch=1.ckpt")
        assert again.logged == whole.logged[2:]
        assert torch.equal(weights(policy), weights(resumed))
        ours = [name for name in state if "States" not in name and "Throughput" not in name]
        assert repr([state[name] for name in ours]) == repr([other[name] for name in ours])
        return whole.logged, tmp_path / "whole"

    return check
