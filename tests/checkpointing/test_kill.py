"""A run that is killed at any moment and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule, PPOModule, RolloutDataModule
from lit_rlhf.callbacks import AdaptiveKL, RolloutCallback
from lit_rlhf.checkpointing import find_last

EPOCHS = 4
PPO = {"critic_lr": 1e-2, "critic_warmup_iterations": 1}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (GRPOModule, {"lr": 1e-3}),
    "grpo_lora": (GRPOModule, {"lr": 1e-2, "lora_rank": 4}),
    "ppo": (PPOModule, {"lr": 1e-3, **PPO}),
    "ppo_lora": (PPOModule, {"lr": 1e-2, "lora_rank": 4, "critic": "adapter", **PPO}),
}


class Witness(RolloutCallback):
    """Notes what each iteration sampled and logged, in files that outlive the process; may kill it on the way."""

    def __init__(self, folder: Path, kill_at: tuple[str, int] | None) -> None:
        self.folder = folder
        self.kill_at = kill_at

    def reached(self, place: str, iteration: int) -> None:
        if self.kill_at == (place, iteration):
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, trainer: L.Trainer, kind: str, iteration: int, content: Any) -> None:
        with (self.folder / f"{kind}-rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([iteration, content]) + "\n")

    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Any) -> None:
        iteration = trainer.datamodule.iteration
        self.note(trainer, "samples", iteration, [rollout.prompt_index.tolist(), rollout.completion_ids.tolist()])
        self.reached("rollout", iteration)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.reached("training", trainer.datamodule.iteration - 1)


class Last(ModelCheckpoint):
    """A checkpoint of each iteration, and a note of what was logged by then: checkpoints come after the module."""

    def __init__(self, witness: Witness, **options: Any) -> None:
        super().__init__(filename="last", every_n_epochs=1, save_on_train_epoch_end=True, **options)
        self.witness = witness

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        kept = {n: v for n, v in values.items() if not n.startswith(("time/", "memory/")) and "per_second" not in n}
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.witness.note(trainer, "metrics", trainer.datamodule.iteration - 1, [trainer.global_step, rates, kept])
        super().on_train_epoch_end(trainer, pl_module)


def train(folder: Path, policy: str, rows: Any, name: str, devices: int, kill_at: tuple[str, int] | None) -> None:
    """The whole life of one process: go on from the last checkpoint if there is one."""
    os.setsid()
    sys.stdout = sys.stderr = (folder / "stderr.txt").open("a", buffering=1)
    torch.manual_seed(4)
    witness = Witness(folder, kill_at)

    def reward(completions: list[str], **columns: Any) -> list[float]:
        if kill_at is not None and kill_at[0] == "rewards" and data.iteration == kill_at[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    if kill_at is not None and kill_at[0] == "writing":
        _die_while_writing(kill_at[1])
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "max_new_tokens": 6, "val_samples": 2, "passes": 2}
    data = RolloutDataModule(rows, val=rows[:2], rewards=reward, seed=0, steps_per_pass=2, **sizes)
    last = Last(witness, dirpath=folder / "kept", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[AdaptiveKL(target=0.05, horizon=50), witness, last],
    )
    kind, options = RUNS[name]
    path = find_last(trainer) if list(folder.glob("kept/*.ckpt")) else None
    trainer.fit(kind(policy, **options), data, ckpt_path=path)


def _die_while_writing(number: int) -> None:
    """Half of a checkpoint is on the disk when the process is killed."""
    save, count = torch.save, iter(range(100))

    def half(content: Any, path: Path) -> None:
        save(content, path)
        if next(count) == number:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half


def start(folder: Path, *args: Any) -> Any:
    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=train, args=(folder, *args))
    process.start()
    return process


def finish(folder: Path, *args: Any) -> None:
    process = start(folder, *args, None)
    process.join(300)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == 0, (folder / "stderr.txt").read_text()[-3000:]


def story(folder: Path) -> dict[str, Any]:
    """Everything that is to be the same; an iteration that was done twice has to have been the same both times."""
    told: dict[str, Any] = {}
    for file in sorted(folder.glob("*-rank*.jsonl")):
        lines = [line for line in file.read_text().splitlines() if line.endswith("]")]
        for line in lines:
            iteration, content = json.loads(line)
            if iteration >= EPOCHS:  # killed after the last checkpoint: Lightning asks for one more rollout, then stops
                continue
            assert told.setdefault(f"{file.stem} {iteration}", content) == content, f"{file.stem} {iteration}"
    checkpoint = torch.load(folder / "kept" / "last.ckpt", weights_only=True)
    told["weights"] = checkpoint["state_dict"]
    told["optimizer"] = checkpoint["optimizer_states"][0]["state"]
    told["counters"] = [checkpoint["global_step"], checkpoint["RolloutDataModule"]]
    told["kl"] = next(state for name, state in checkpoint["callbacks"].items() if name.startswith("AdaptiveKL"))
    return told


def assert_same(one: Any, other: Any, place: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place} {key}")
    else:
        assert one == other or (one != one and other != other), place


@pytest.fixture(scope="module")
def whole(tmp_path_factory, policy_dir):
    """Folders of uninterrupted runs, and how long they took."""
    made: dict[Any, tuple[Path, float]] = {}

    def get(rows: Any, name: str, devices: int = 1) -> tuple[Path, float]:
        if (name, devices) not in made:
            folder, begin = tmp_path_factory.mktemp("whole"), time.monotonic()
            finish(folder, policy_dir, rows, name, devices)
            made[name, devices] = folder, time.monotonic() - begin
        return made[name, devices]

    return get


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kill_at", [("rewards", 0), ("rollout", 1), ("training", 2), ("writing", 2)], ids=str)
def test_killed_and_resumed(tmp_path, policy_dir, rows, whole, kill_at):
    process = start(tmp_path, policy_dir, rows, "grpo", 1, kill_at)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "stderr.txt").read_text()[-3000:]
    finish(tmp_path, policy_dir, rows, "grpo", 1)
    assert_same(story(whole(rows, "grpo")[0]), story(tmp_path))
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["last.ckpt"], "half a checkpoint was left behind"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.distributed)])
@pytest.mark.parametrize("name", RUNS)
def test_killed_twenty_times_at_random(tmp_path, policy_dir, rows, whole, name, devices):
    expected, seconds = whole(rows, name, devices)
    chance = random.Random(f"{name} {devices}")
    common = (policy_dir, rows, name, devices)
    killed = 0
    for number in range(20):
        folder = tmp_path / str(number)
        process = start(folder, *common, None)
        process.join(chance.uniform(0.02, 0.98) * seconds)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
            finish(folder, *common)
        assert_same(story(expected), story(folder))
    assert killed >= 10
