"""What each of the processes of ``test_fsdp2.py`` does; started by :func:`launch`, or imported for a single process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_rlhf import GRPOModule, PPOModule, RolloutDataModule
from lit_rlhf.callbacks import RolloutCallback
from lit_rlhf.strategies import whole

SCENARIOS: dict[str, tuple[type, dict[str, Any]]] = {
    "grpo": (GRPOModule, {}),
    "grpo-checkpointing": (GRPOModule, {"gradient_checkpointing": True}),
    "grpo-lora": (GRPOModule, {"lora_rank": 2}),
    "grpo-lora-trained": (GRPOModule, {"adapter": "trained"}),
    "ppo": (PPOModule, {}),
    "ppo-shared": (PPOModule, {"critic": "shared"}),
    "ppo-lora": (PPOModule, {"lora_rank": 2, "critic": "adapter"}),
}
# The same runs, with weights that stay sharded in rollouts.
SHARDED_ROLLOUTS = ["grpo", "grpo-lora", "ppo", "ppo-lora"]
SCENARIOS.update(
    {
        f"{name}-sharded": (SCENARIOS[name][0], SCENARIOS[name][1] | {"rollout_weights": "sharded"})
        for name in SHARDED_ROLLOUTS
    }
)
ROWS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b)}
    for a, b in [(1, 2), (30, 4), (12, 345), (7, 7), (99, 1), (5, 60), (8, 8)]
]


def rewards(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Share of digits; the completions of one prompt are all worth the same: a dead group."""
    return [
        0.5 if prompt.startswith("7") else sum(c.isdigit() for c in text) / max(1, len(text))
        for prompt, text in zip(prompts, completions, strict=True)
    ]


class Record(RolloutCallback):
    """Keeps what the optimizer was given and how rollouts found the weights; ends the run early if told to."""

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after = stop_after
        self.gradients: list[torch.Tensor] = []
        self.sharded_in_rollouts: set[bool] = set()

    def on_rewards_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Any) -> None:
        self.sharded_in_rollouts |= {hasattr(p, "full_tensor") for p in module.parameters()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        grads = [whole(p.grad).flatten() for p in pl_module.policy.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(grads))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch + 1 == self.stop_after:
            trainer.should_stop = True


def fit(
    scenario: str,
    policy: str,
    folder: Path,
    devices: int,
    stop_after: int | None = None,
    ckpt_path: str | None = None,
    shards: bool = False,
) -> dict[str, Any]:
    """Three iterations of five prompts: two ranks have three and two micro-batches.

    Args:
        scenario: Of :data:`SCENARIOS`.
        policy: Its folder; a trained adapter is in one inside it.
        folder: For checkpoints and export.
        devices: Processes.
        stop_after: Iterations, if not all.
        ckpt_path: To go on from.
        shards: Write checkpoints as folders of shards.
    """
    L.seed_everything(3, verbose=False)
    algorithm, options = SCENARIOS[scenario]
    if "adapter" in options:
        options = {"adapter": str(Path(policy, options["adapter"]))}
    strategy: Any = "auto"
    if devices > 1:
        strategy = ModelParallelStrategy(
            data_parallel_size=devices,
            tensor_parallel_size=1,
            process_group_backend="gloo",
            save_distributed_checkpoint=shards,
        )
    record = Record(stop_after)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=3,
        logger=False,
        callbacks=[record, ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=0)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    module = algorithm(policy, lr=1e-3, kl_coef=0.1, **options)
    data = RolloutDataModule(
        ROWS,
        val=ROWS[:5],
        rewards=[rewards],
        prompts_per_iteration=5,
        group_size=4,
        max_new_tokens=6,
        micro_batch_size=4,
        val_samples=2,
        seed=2,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    times = ("time/", "memory/", "per_second")
    return {
        "gradients": record.gradients,
        "sharded_in_rollouts": list(record.sharded_in_rollouts),
        "weights": torch.cat([whole(p.detach()).flatten().clone() for p in module.policy.parameters()]),
        "metrics": {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not any(part in name for part in times)
        },
        "tokens": data.rollout.completion_ids.tolist(),
        "shares_prompts": module.shares_prompts,
    }


def launch(policy: str, folder: Path, scenarios: list[str], kind: str = "file") -> None:
    """Start two processes that do :func:`main`, with its arguments, and wait for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [__file__, policy, str(folder), json.dumps(scenarios), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]


def main(policy: str, folder: str, scenarios: list[str], kind: str = "file") -> None:
    """Run the scenarios on all ranks, each once through and once stopped and resumed.

    Args:
        policy: Its folder.
        folder: For the results: ``SCENARIO.pt`` of the first rank.
        scenarios: Names.
        kind: Of the checkpoints, ``file`` or ``shards``.
    """
    shards = kind == "shards"
    torch.set_num_threads(1)
    for name in scenarios:
        whole_run = fit(name, policy, Path(folder, name), devices=2, shards=shards)
        fit(name, policy, Path(folder, f"{name}-resumed"), devices=2, stop_after=2, shards=shards)
        resumed = fit(
            name,
            policy,
            Path(folder, f"{name}-resumed"),
            devices=2,
            ckpt_path=str(Path(folder, f"{name}-resumed", "last.ckpt")),
            shards=shards,
        )
        if torch.distributed.get_rank() == 0:
            torch.save({"whole": whole_run, "resumed": resumed}, Path(folder, f"{name}.pt"))
        torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:])
