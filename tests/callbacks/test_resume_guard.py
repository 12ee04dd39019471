"""What a checkpoint may be resumed with, and what not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.callbacks import ResumeGuard
from lit_rlhf.checkpointing import FORMAT, STATE_KEY, AtomicCheckpointIO, find_last
from lit_rlhf.checkpointing.fingerprint import folder_identity
from lit_rlhf.errors import CheckpointError, ConfigurationError, OutputError


@pytest.fixture
def saved(make_trainer, make_data, policy_dir, tmp_path):
    """A run of one iteration and its checkpoint."""
    trainer = make_trainer()
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


@pytest.fixture
def resume(make_trainer, make_data, policy_dir):
    def run(path: Path, module: Any = None, guard: Any = None, trainer: Any = None, **data: Any) -> Any:
        own = make_trainer(**{"max_epochs": 2, "callbacks": [guard] if guard else None, **(trainer or {})})
        module = GRPOModule(policy_dir, lr=1e-3) if module is None else module
        own.fit(module, make_data(**data), ckpt_path=path)
        return own

    return run


def changed_file(policy: str, folder: Path, name: str, change: Any) -> str:
    shutil.copytree(policy, folder)
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    return str(folder)


def test_the_same_run_is_resumed_and_nothing_is_said(saved, resume, caplog):
    guard = ResumeGuard()
    trainer = resume(saved, guard=guard, trainer={"max_epochs": 1})
    assert trainer.global_step == 1
    assert not [record for record in caplog.records if "resume_guard" in record.name]
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        ({}, {"group_size": 2}, "group_size: 4 -> 2"),
        ({}, {"temperature": 0.7}, "temperature: 1.0 -> 0.7"),
        ({}, {"max_new_tokens": 5}, "max_new_tokens: 6 -> 5"),
        ({}, {"passes": 2}, "passes: 1 -> 2"),
        ({}, {"reward_weights": [2.0]}, "rewards"),
        ({"loss_aggregation": "sequence_mean"}, {}, "loss_aggregation: "),
        ({"kl_coef": 0.1}, {}, "kl_coef: 0.04 -> 0.1"),
        ({"lora_rank": 2}, {}, "lora_rank: 0 -> 2"),
        ({"kl_placement": "loss"}, {}, "trained with kl_placement='reward', now it is 'loss'"),
    ],
)
def test_another_run_is_refused_by_both_values(saved, resume, policy_dir, module, data, message):
    with pytest.raises(CheckpointError, match=message.replace("'", ".")):
        resume(saved, GRPOModule(policy_dir, lr=1e-3, **module), **data)


def test_another_prompt_is_refused(saved, resume, rows):
    other = [*rows[:-1], {**rows[-1], "answer": "0"}]
    with pytest.raises(CheckpointError, match=r"training prompts: 6 prompts \(\w+\) -> 6 prompts \(\w+\)"):
        resume(saved, train=other)


def test_another_base_model_or_tokenizer_is_refused(saved, resume, policy_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(policy_dir, other)
    weights = load_file(other / "model.safetensors")
    save_file({n: w + 1e-3 for n, w in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="base model: "):
        resume(saved, GRPOModule(str(other), lr=1e-3))

    def renamed(content: bytes) -> bytes:
        return json.dumps({**json.loads(content), "chat_template": "{{ messages }}"}).encode()

    template = changed_file(policy_dir, tmp_path / "template", "tokenizer_config.json", renamed)
    with pytest.raises(CheckpointError, match=r"run \(tokenizer: "):
        resume(saved, GRPOModule(template, lr=1e-3))


def test_the_same_model_in_another_folder_is_the_same(saved, resume, policy_dir, tmp_path):
    shutil.copytree(policy_dir, tmp_path / "moved")
    resume(saved, GRPOModule(str(tmp_path / "moved"), lr=1e-3))


def test_an_allowed_change_is_said(saved, resume, rows, caplog):
    allowed = ResumeGuard(allow=["training prompts", "temperature"])
    trainer = resume(saved, guard=allowed, train=rows[:5], temperature=0.5)
    assert trainer.global_step == 2
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "temperature: 1.0 -> 0.5, as allowed: from here on this is another run" in said
    assert "training prompts: 6 prompts" in said
    assert "length of the run: 1 -> 2 optimizer steps" in said


def test_the_objective_cannot_be_allowed_to_change():
    with pytest.raises(ConfigurationError, match="kl_placement cannot be allowed to change"):
        ResumeGuard(allow=["kl_placement"])


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_checkpoint_of_another_algorithm(saved, make_trainer, make_data, policy_dir, rows, stage):
    trainer, data = make_trainer(max_epochs=2), make_data(val=rows)
    with pytest.raises(CheckpointError, match="the checkpoint is of a GRPOModule, now the module is PPOModule"):
        getattr(trainer, stage)(PPOModule(policy_dir), datamodule=data, ckpt_path=saved)


def edited(path: Path, change: Any) -> Path:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    return path


def test_an_older_checkpoint_is_resumed_and_that_is_said(saved, resume, caplog):
    older = edited(saved, lambda content: content["callbacks"].pop(STATE_KEY))
    assert resume(older).global_step == 2
    assert "whether this is the same run cannot be known" in caplog.text


def test_a_newer_checkpoint_is_refused(saved, resume):
    newer = edited(saved, lambda content: content["callbacks"][STATE_KEY].update(format=FORMAT + 1))
    with pytest.raises(CheckpointError, match="written by a newer lit_rlhf"):
        resume(newer)


def test_weights_alone_can_be_evaluated_but_not_continued(make_trainer, make_data, policy_dir, rows, tmp_path):
    trainer = make_trainer()
    trainer.fit(GRPOModule(policy_dir), make_data())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    make_trainer().validate(GRPOModule(policy_dir), make_data(val=rows), ckpt_path=tmp_path / "weights.ckpt")
    with pytest.raises(CheckpointError, match="holds weights alone"):
        make_trainer(max_epochs=2).fit(GRPOModule(policy_dir), make_data(), ckpt_path=tmp_path / "weights.ckpt")


def test_a_damaged_checkpoint_is_left_as_it_is(saved, resume):
    damaged = saved.read_bytes()[:-1000]
    saved.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="the file is cut off"):
        resume(saved)
    assert saved.read_bytes() == damaged


def test_a_damaged_middle_of_a_checkpoint(saved, resume):
    content = bytearray(saved.read_bytes())
    place = content.find(b"pytorch-lightning_version") - 40
    content[place : place + 60] = b"\xff" * 60
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        resume(saved)


def test_no_room_for_a_checkpoint_is_said_before_training(make_trainer, make_data, policy_dir, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match="a checkpoint of this run takes about"):
        make_trainer(enable_checkpointing=True).fit(GRPOModule(policy_dir), make_data())


def test_last_is_the_newest_of_all_runs(make_trainer, tmp_path):
    import os

    with pytest.raises(CheckpointError, match="ckpt_path: last finds no checkpoint in"):
        find_last(make_trainer())
    files = [tmp_path / "lightning_logs" / f"version_{n}" / "checkpoints" / "last.ckpt" for n in (0, 1)]
    diverged = tmp_path / "checkpoints" / "diverged.ckpt"
    for age, file in enumerate([*files, diverged]):
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1000 + age, 1000 + age))
    assert find_last(make_trainer()) == files[1]


def test_large_files_are_told_apart_by_samples(tmp_path):
    for name, byte in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        content = bytearray(2**22)
        content[2**21 :] = bytes([byte]) * 2**21
        (tmp_path / name / "model.safetensors").write_bytes(content)
    a, b, c = (folder_identity(tmp_path / name) for name in "abc")
    assert a == b != c
    assert folder_identity(tmp_path) is None
