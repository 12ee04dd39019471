"""Two gloo processes judge alike, and tell an alarm once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.callbacks import HealthMonitor, OveroptimizationMonitor, SampleTable, Throughput
from tests.distributed.test_ddp import only_even_prompts

pytestmark = pytest.mark.distributed


class Keep(L.Callback):
    """Writes what the monitors of each rank remember to a folder: the ranks are processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        kinds = (HealthMonitor, OveroptimizationMonitor, Throughput)
        states = {type(c).__name__: c.state_dict() for c in trainer.callbacks if isinstance(c, kinds)}
        torch.save(states, self.folder / f"rank{trainer.global_rank}.pt")


def test_all_ranks_agree_and_one_tells(tmp_path, policy_dir, rows, make_trainer):
    data = RolloutDataModule(
        rows[:4],
        val=rows,
        rewards=only_even_prompts(rows),
        prompts_per_iteration=4,
        group_size=4,
        max_new_tokens=6,
        seed=2,
        shuffle=False,
        val_samples=0,
    )
    trainer = make_trainer(
        devices=2,
        strategy="ddp_fork",
        max_epochs=6,
        check_val_every_n_epoch=2,
        callbacks=[Keep(tmp_path), OveroptimizationMonitor(), SampleTable(every_n_iterations=4)],
        logger=CSVLogger(tmp_path, name="logs", version=0),
        enable_checkpointing=True,
    )
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), data)
    one, two = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    assert one.keys() == two.keys() == {"HealthMonitor", "OveroptimizationMonitor", "Throughput"}
    for name in ("HealthMonitor", "Throughput"):
        assert one[name] == two[name]
    assert one["OveroptimizationMonitor"]["overoptimization"] == two["OveroptimizationMonitor"]["overoptimization"]
    log_dir = tmp_path / "logs" / "version_0"
    lines = [json.loads(line) for line in (log_dir / "health.jsonl").open(encoding="utf-8")]
    told = [line["rule"] for line in lines if line["event"] == "alarm"]
    assert told == [alarm["rule"] for alarm in one["HealthMonitor"]["alarms"]]
    assert "truncation" in told
    assert "constant_reward" not in told
    files = {file.name: file.read_text(encoding="utf-8").splitlines() for file in (log_dir / "samples").iterdir()}
    assert files.keys() == {f"iteration-0000{n}-rank{rank}.jsonl" for n in (0, 4) for rank in (0, 1)}
    groups = [{json.loads(line)["group"] for line in files[f"iteration-00004-rank{rank}.jsonl"]} for rank in (0, 1)]
    assert groups == [{0, 2}, {1, 3}]
