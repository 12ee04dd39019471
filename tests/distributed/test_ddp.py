"""Two gloo processes do what one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule, PPOModule, RolloutBatch, RolloutDataModule
from lit_rlhf.callbacks import EvaluationWriter, RolloutCallback

pytestmark = pytest.mark.distributed


class Recorder(RolloutCallback):
    """Writes what each rank saw to a folder: the ranks are processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, list[Any]] = {"gradients": [], "rows": [], "micro_batches": []}

    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        lengths = rollout.completion_lengths.tolist()
        for row, length in enumerate(lengths):
            ids = tuple(rollout.completion_ids[row, :length].tolist())
            place = int(rollout.group_index[row]), int(rollout.prompt_index[row])
            self.record["rows"].append((trainer.datamodule.iteration, *place, ids))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.record["micro_batches"].append(bool(batch.rows.completion_mask.any()))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in pl_module.policy.parameters() if p.grad is not None]
        self.record["gradients"].append(torch.cat(gradients).clone() if gradients else None)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record["weights"] = torch.cat([p.detach().flatten() for p in pl_module.policy.parameters()])
        self.record["before training"] = pl_module.initial_metrics
        self.record["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save(self.record, self.folder / f"rank{trainer.global_rank}.pt")


def only_even_prompts(rows: Any) -> Callable[..., list[float]]:
    """A reward that is constant on the prompts of the second rank, not on those of the first."""
    texts = [row["prompt"] for row in rows]

    def reward_of_even(completions: list[str], prompts: list[str]) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        return [float(len(text)) if texts.index(prompt) % 2 == 0 else 1.0 for prompt, text in pairs]

    return reward_of_even


def run(folder: Path, policy: str, rows: Any, rewards: Any, devices: int, **options: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    module_options = {"lr": 1e-4, "kl_coef": 0.1, **options.pop("module", {})}
    epochs = options.pop("max_epochs", 1)
    algorithm = options.pop("algorithm", GRPOModule)
    ckpt_path, callbacks = options.pop("ckpt_path", None), options.pop("callbacks", [])
    defaults = {"prompts_per_iteration": 5, "group_size": 4, "max_new_tokens": 6, "seed": 2, "micro_batch_size": 4}
    defaults |= {"val": rows[:5], "val_samples": 2}
    data = RolloutDataModule(rows, rewards=rewards, **{**defaults, **options})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        max_epochs=epochs,
        callbacks=[Recorder(folder), EvaluationWriter(str(folder / "evaluation")), *callbacks],
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(algorithm(policy, **module_options), data, ckpt_path=ckpt_path)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(devices)]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_two_ranks_with_three_and_two_micro_batches(tmp_path, policy_dir, rows, digits, aggregation):
    """Five prompts: the first rank has three micro-batches, the second two and an empty one."""
    options = {"module": {"loss_aggregation": aggregation, "kl_placement": "loss"}}
    (single,) = run(tmp_path / "one", policy_dir, rows, [digits], 1, **options)
    ranks = run(tmp_path / "two", policy_dir, rows, [digits], 2, **options)
    assert [rank["micro_batches"] for rank in ranks] == [[True, True, True], [True, True, False]]
    expected = single["gradients"][0]
    for rank in ranks:
        assert (rank["gradients"][0] - expected).norm() <= 1e-6 * expected.norm()


def test_several_iterations(tmp_path, policy_dir, rows, digits):
    options = {"max_epochs": 3, "passes": 2, "steps_per_pass": 2}
    (single,) = run(tmp_path / "one", policy_dir, rows, [digits], 1, **options)
    ranks = run(tmp_path / "two", policy_dir, rows, [digits], 2, **options)
    # The same completions of the same prompts, each on one rank.
    assert sorted(ranks[0]["rows"] + ranks[1]["rows"]) == sorted(single["rows"])
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert torch.allclose(ranks[0]["weights"], single["weights"], atol=1e-5)
    for name, value in single["metrics"].items():
        if not name.startswith(("time/", "memory/")) and "per_second" not in name and "gap" not in name:
            for rank in ranks:
                assert rank["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_a_rank_without_a_live_row(tmp_path, policy_dir, rows):
    """The prompts of the second rank are all dead: it takes part with a zero gradient."""
    rewards = [only_even_prompts(rows)]
    options = {"shuffle": False, "module": {"kl_coef": 0.0}}
    (single,) = run(tmp_path / "one", policy_dir, rows, rewards, 1, **options)
    ranks = run(tmp_path / "two", policy_dir, rows, rewards, 2, **options)
    expected = single["gradients"][0]
    assert (ranks[1]["gradients"][0] - expected).norm() <= 1e-6 * expected.norm()


def test_a_rank_without_a_prompt(tmp_path, policy_dir, rows, digits):
    (single,) = run(tmp_path / "one", policy_dir, rows[:1], [digits], 1)
    ranks = run(tmp_path / "two", policy_dir, rows[:1], [digits], 2)
    assert ranks[1]["rows"] == []
    expected = single["gradients"][0]
    assert (ranks[1]["gradients"][0] - expected).norm() <= 1e-6 * expected.norm()
    assert ranks[0]["metrics"]["val/accuracy"] == single["metrics"]["val/accuracy"]


class Vote:
    """Finds completions right that begin with a 1; the first character is the answer."""

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(text.startswith("1")) for text in completions]

    def answer_key(self, completion: str, **columns: Any) -> str:
        return completion[:1]


def test_held_out_prompts_count_once_on_one_rank_or_two(tmp_path, policy_dir, rows, digits):
    """Sets of five prompts and of one: ranks with three, two, one and no prompt. Not a digit may differ."""
    ratings = [{"set": "a", "prompt_index": n, "completion": str(n), "rating": n} for n in range(5)]
    options = {
        "val": {"a": rows[:5], "b": rows[5:]},
        "val_batch_size": 2,
        "verifier": Vote(),
        "val_samples": 4,
        "pass_k": [1, 2, 4],
        "val_ratings": ratings,
    }
    (single,) = run(tmp_path / "one", policy_dir, rows, [digits], 1, **options)
    ranks = run(tmp_path / "two", policy_dir, rows, [digits], 2, **options)
    before = single["before training"]
    assert {"val/accuracy_low", "val/a/maj@4", "val/b/pass@2_high", "val/verifier", "val/human_rated"} <= before.keys()
    assert [rank["before training"] for rank in ranks] == [before, before]
    names = [f"val-00000000-{name}.jsonl" for name in ("a", "b")]
    one, two = ([(tmp_path / where / "evaluation" / name).read_bytes() for name in names] for where in ("one", "two"))
    assert [content.count(b"\n") for content in one] == [5, 1]
    assert one == two


@pytest.mark.parametrize("critic", ["own", "shared"])
def test_ppo_whitens_and_learns_as_one_process_does(tmp_path, policy_dir, rows, digits, critic):
    options = {
        "algorithm": PPOModule,
        "module": {"critic": critic, "critic_warmup_iterations": 1, "critic_lr": 1e-3},
        "max_epochs": 3,
        "passes": 2,
    }
    (single,) = run(tmp_path / "one", policy_dir, rows, [digits], 1, **options)
    ranks = run(tmp_path / "two", policy_dir, rows, [digits], 2, **options)
    assert sorted(ranks[0]["rows"] + ranks[1]["rows"]) == sorted(single["rows"])
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert torch.allclose(ranks[0]["weights"], single["weights"], atol=2e-5)
    for name in ("value/explained_variance", "value/error", "value/loss", "policy/loss", "loss"):
        assert ranks[1]["metrics"][name] == pytest.approx(single["metrics"][name], rel=1e-3, abs=1e-5), name
