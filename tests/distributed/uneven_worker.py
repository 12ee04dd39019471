"""What each of the processes of ``test_uneven.py`` does; started by torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lit_rlhf import GRPOModule, RolloutBatch, RolloutDataModule
from lit_rlhf.callbacks import RolloutCallback
from lit_rlhf.engines import TransformersEngine

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in [(1, 2), (30, 4), (12, 345), (7, 7), (99, 1)]]

# Options of the DataModule, and what goes wrong on which rank.
SCENARIOS: dict[str, tuple[dict[str, Any], str | None]] = {
    "uneven": ({"val": ROWS[:3], "val_batch_size": 1}, None),
    "one prompt": ({"train": ROWS[:1], "prompts_per_iteration": 1, "val": ROWS[:1]}, None),
    "reward": ({}, "reward"),
    "held-out reward": ({"val": ROWS[:2]}, "verifier"),
    "sampling": ({}, "sampling"),
}


def rank() -> int:
    return torch.distributed.get_rank()


class Rewards:
    """Share of digits; raises on one rank, if told to, from its second call on."""

    def __init__(self, failing_rank: int | None) -> None:
        self.__name__ = "digits"
        self.failing_rank = failing_rank
        self.calls = 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        if self.calls > 1 and rank() == self.failing_rank:
            raise ValueError("the service is gone")
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


class FailingEngine(TransformersEngine):
    """Runs out of memory on one rank."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if rank() == 1:
            raise MemoryError("no memory left")
        return super().generate(*args, **kwargs)


class Count(RolloutCallback):
    """Rows of this rank in each iteration, and how many have a token in each micro-batch."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.live: list[bool] = []

    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        self.rows.append(len(rollout))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.live.append(bool(batch.rows.completion_mask.any()))


def run(strategy: str, scenario: str, policy: str, folder: str) -> dict[str, Any]:
    """Two iterations; what came of them on this rank.

    Args:
        strategy: ``ddp``, ``fsdp2`` or ``fsdp2-sharded``, whose weights stay sharded in rollouts.
        scenario: Of :data:`SCENARIOS`.
        policy: Its folder.
        folder: For whatever the run writes.
    """
    kinds: dict[str, Any] = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    }
    count = Count()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=kinds[strategy.removesuffix("-sharded")](),
        max_epochs=2,
        logger=False,
        callbacks=[count],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    options, failing = SCENARIOS[scenario]
    data = RolloutDataModule(
        **{"train": ROWS, "prompts_per_iteration": 5, "val_samples": 2, **options},
        rewards=[Rewards(1 if failing == "reward" else None)],
        verifier=Rewards(1) if failing == "verifier" else None,
        # A prompt after the other: two ranks run different numbers of them, of different lengths.
        engine=FailingEngine() if failing == "sampling" else TransformersEngine(max_rows=4),
        group_size=4,
        max_new_tokens=6,
        micro_batch_size=4,
        seed=2,
    )
    try:
        weights = "sharded" if strategy.endswith("-sharded") else "whole"
        trainer.fit(GRPOModule(policy, lr=1e-3, rollout_weights=weights), data)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if "val/" in name}
    return {"rows": count.rows, "live": count.live, "steps": trainer.global_step, "values": values}


if __name__ == "__main__":
    torch.set_num_threads(1)
    strategy, policy, folder = sys.argv[1:]
    for scenario in SCENARIOS:
        found = run(strategy, scenario, policy, folder)
        Path(folder, f"{scenario} {rank()}.json").write_text(json.dumps(found))
