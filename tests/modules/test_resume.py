"""A run that was stopped at the end of an iteration and resumed is the run that was not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.errors import ConfigurationError

MODULES = {
    "grpo": (GRPOModule, {"lr": 1e-3}, {}),
    "grpo_lora": (GRPOModule, {"lr": 1e-2, "lora_rank": 4}, {"passes": 2}),
    "ppo": (PPOModule, {"lr": 1e-3, "critic_lr": 1e-2, "critic_warmup_iterations": 1}, {"passes": 2}),
    "ppo_shared": (PPOModule, {"lr": 1e-3, "critic": "shared"}, {"steps_per_pass": 2, "micro_batch_size": 5}),
}


class Record(ModelCheckpoint):
    """Every iteration's metrics, besides the checkpoints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append({n: v for n, v in metrics.items() if not n.startswith(("time/", "memory/"))})


def run(
    make_trainer: Any, make_data: Any, rows: Any, policy: str, name: str, folder: Path, ckpt: Any = None, **trainer
):
    torch.manual_seed(4)
    kind, options, data_options = MODULES[name]
    record = Record(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    data = make_data(rows, val=rows[:2], prompts_per_iteration=4, **data_options)
    module = kind(policy, **options)
    fit = make_trainer(**{"enable_checkpointing": True, "max_epochs": 5, "callbacks": [record], **trainer})
    fit.fit(module, data, ckpt_path=ckpt)
    return module, data, record, fit


@pytest.mark.parametrize("name", MODULES)
def test_resumed_equals_uninterrupted(make_trainer, make_data, rows, policy_dir, tmp_path, name, monkeypatch):
    import lit_rlhf.rollout.datamodule as datamodule

    made: list[int] = []
    original = datamodule.make_rollout

    def counting(data: Any, trainer: Any, iteration: int) -> Any:
        made.append(iteration)
        return original(data, trainer, iteration)

    monkeypatch.setattr(datamodule, "make_rollout", counting)
    common = (make_trainer, make_data, rows, policy_dir, name)
    whole, _, seen, trainer = run(*common, tmp_path / "whole")
    assert made == [0, 1, 2, 3, 4]
    made.clear()
    resumed, data, again, resumed_trainer = run(*common, tmp_path / "again", tmp_path / "whole" / "epoch=1.ckpt")
    assert made == [2, 3, 4]
    assert data.iteration == 5
    assert resumed_trainer.global_step == trainer.global_step
    for (key, value), (other_key, other) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert key == other_key
        assert torch.equal(value, other), key
    states = zip(
        trainer.optimizers[0].state_dict()["state"].values(),
        resumed_trainer.optimizers[0].state_dict()["state"].values(),
        strict=True,
    )
    for state, other in states:
        assert all(torch.equal(state[entry], other[entry]) for entry in state)
    for before, after in zip(seen.seen[2:], again.seen, strict=True):
        shared = {n for n in before if "per_second" not in n}
        assert {n: before[n] for n in shared} == {n: after[n] for n in shared}


def test_checkpoints_after_validation_resume_too(make_trainer, make_data, rows, policy_dir, tmp_path):
    """Lightning's own default saves when validation ends, before the epoch does."""
    common = (make_trainer, make_data, rows, policy_dir, "grpo", tmp_path / "a")
    whole, _, _, _ = run(*common)
    saving = ModelCheckpoint(
        dirpath=tmp_path / "val", filename="{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=False
    )
    run(*common, callbacks=[saving])
    resumed, data, _, _ = run(*common, ckpt=tmp_path / "val" / "epoch=1.ckpt", callbacks=[])
    assert data.iteration == 5
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_reference_and_the_frozen_base_are_those_of_the_start(make_trainer, make_data, rows, policy_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    common = (make_trainer, make_data, rows, policy_dir, "grpo")
    run(*common, tmp_path / "a", max_epochs=2)
    checkpoint = torch.load(tmp_path / "a" / "epoch=1.ckpt", weights_only=True)
    assert not any(key.startswith("reference") for key in checkpoint["state_dict"])
    resumed, _, _, _ = run(*common, tmp_path / "b", tmp_path / "a" / "epoch=1.ckpt", max_epochs=3)
    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    for one, other in zip(resumed.reference.model.parameters(), base.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_placement_of_the_penalty_is_refused(make_trainer, make_data, rows, policy_dir, tmp_path):
    run(make_trainer, make_data, rows, policy_dir, "grpo", tmp_path, max_epochs=1)
    module = GRPOModule(policy_dir, kl_placement="loss")
    with pytest.raises(ConfigurationError, match="trained with kl_placement='reward', now it is 'loss'"):
        make_trainer(max_epochs=2).fit(module, make_data(rows), ckpt_path=tmp_path / "epoch=0.ckpt")


def test_a_checkpoint_inside_an_iteration_is_refused(make_trainer, make_data, rows, policy_dir, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    trainer = make_trainer(enable_checkpointing=True, callbacks=[saving])
    with pytest.raises(ConfigurationError, match="in the middle of an iteration would not resume exactly"):
        trainer.fit(GRPOModule(policy_dir), make_data(rows, steps_per_pass=2))
    assert not list(tmp_path.glob("*.ckpt"))


def test_the_module_loads_from_its_checkpoint_alone(make_trainer, make_data, rows, policy_dir, tmp_path):
    trained, _, _, _ = run(make_trainer, make_data, rows, policy_dir, "grpo", tmp_path, max_epochs=2)
    trainer = make_trainer(max_epochs=2)
    module = GRPOModule(policy_dir)
    (metrics,) = trainer.validate(module, make_data(None, val=rows), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert "val/accuracy" in metrics
    for one, other in zip(trained.policy.parameters(), module.policy.parameters(), strict=True):
        assert torch.equal(one, other)
