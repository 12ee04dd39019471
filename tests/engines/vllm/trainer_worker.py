"""Train the quickstart's base: ``trainer_worker.py STRATEGY OUT [URL]``.

``auto`` is one process without vLLM, ``ddp`` and ``fsdp2`` are two processes with it, ``sharded`` are two whose weights
stay in shards while they sample.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.engines import VLLMServers
from lit_rlhf.rewards import MathAnswer
from tests.engines.vllm.conftest import ROOT, History


class Written(History):
    """Writes the metrics where the test looks for them: they are known in the training processes only."""

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = Path(out)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            self.out.write_text(json.dumps(self.metrics), encoding="utf-8")


def main(strategy: str, out: str, *url: str) -> None:
    torch.set_num_threads(1)
    sharded = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
    module = GRPOModule(
        str(ROOT / "checkpoints" / "arithmetic"),
        lr=3e-4,
        rollout_weights="sharded" if strategy == "sharded" else "whole",
    )
    data = RolloutDataModule(
        ROOT / "recipes" / "quickstart" / "data" / "train.jsonl",
        rewards=[MathAnswer()],
        prompts_per_iteration=15,  # one process has more of them than the other
        group_size=8,
        max_new_tokens=8,
        seed=1,
        engine=VLLMServers(*url, max_rows=32) if url else "transformers" if strategy == "auto" else "vllm",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if strategy == "auto" else 2,
        strategy={"ddp": "ddp_fork", "fsdp2": sharded, "sharded": sharded}.get(strategy, strategy),
        max_epochs=3,
        callbacks=[Written(out)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(out).parent,
    )
    trainer.fit(module, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
