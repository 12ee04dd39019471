"""A reward that can be gamed is caught, and the checkpoint that is kept is the best by the held-out metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.callbacks import OveroptimizationMonitor
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.rewards import MathAnswer

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart" / "data"


def right_or_many_ones(completions: list[str], answer: list[str]) -> list[float]:
    """Pays for the right sum, and pays more for every 1: at first both can be had."""
    pairs = zip(completions, answer, strict=True)
    return [float(text == wanted) + 0.5 * text.count("1") for text, wanted in pairs]


@pytest.fixture
def game(make_trainer, tmp_path):
    """Train the adder on a reward; the monitor, the module and the trainer."""

    def run(
        monitor: OveroptimizationMonitor,
        reward: Any,
        epochs: int = 8,
        lr: float = 5e-4,
        ckpt: Any = None,
        save: Any = (),
        prompts: int = 12,
    ):
        data = RolloutDataModule(
            str(QUICKSTART / "train.jsonl"),
            val=[json.loads(line) for line in (QUICKSTART / "val.jsonl").open(encoding="utf-8")][:64],
            rewards=reward,
            verifier=MathAnswer(),
            prompts_per_iteration=prompts,
            max_new_tokens=8,
            val_samples=0,
            seed=1,
        )
        trainer = make_trainer(
            callbacks=[monitor, *save],
            max_epochs=epochs,
            check_val_every_n_epoch=2,
            enable_checkpointing=True,
            logger=CSVLogger(tmp_path / "logs"),
        )
        module = GRPOModule(str(ROOT / "checkpoints" / "arithmetic"), lr=lr, kl_coef=0.0, warmup_ratio=0.0)
        trainer.fit(module, data, ckpt_path=ckpt)
        return module, trainer, data

    return run


def test_it_is_caught_and_the_best_is_kept(game, make_trainer, capsys):
    monitor = OveroptimizationMonitor()
    module, trainer, data = game(monitor, right_or_many_ones)
    (alarm,) = monitor.alarms
    later = monitor.evaluations[1:]
    best = max(later, key=lambda evaluation: evaluation.held_out)
    lately = [e for e in later if e.iteration <= alarm.iteration][-2:]
    peak = max(monitor.evaluations, key=lambda evaluation: evaluation.held_out)
    assert all(e.held_out < peak.held_out - 0.05 and e.reward > peak.reward for e in lately)
    assert alarm.figure == lately[-1].held_out
    # The file has the weights of that iteration: validated anew they reach what was reached then.
    assert monitor.best_model_score == pytest.approx(best.held_out)
    assert torch.load(monitor.best_model_path, weights_only=False)["epoch"] == best.iteration
    checked = make_trainer(enable_checkpointing=True)
    (again,) = checked.validate(module, data, ckpt_path=monitor.best_model_path, verbose=False)
    assert again["val/accuracy"] == pytest.approx(best.held_out)
    # And everybody was told.
    shown = " ".join(capsys.readouterr().out.split())
    assert f"health warning overoptimization (iteration {alarm.iteration}): reward rose from" in shown
    lines = [json.loads(line) for line in (Path(trainer.log_dir) / "health.jsonl").open(encoding="utf-8")]
    assert sum(line["rule"] == "overoptimization" for line in lines) == 1


def test_an_honest_reward_is_no_game(game):
    monitor = OveroptimizationMonitor()
    game(monitor, MathAnswer(), prompts=48)
    assert monitor.alarms == []
    assert len(monitor.evaluations) == 5


def test_it_can_stop_the_run(game):
    monitor = OveroptimizationMonitor(stop=True)
    _, trainer, _ = game(monitor, right_or_many_ones)
    (alarm,) = monitor.alarms
    assert trainer.current_epoch == alarm.iteration + 1 < 8


def test_a_resumed_run_goes_on(game, tmp_path):
    whole, resumed = OveroptimizationMonitor(), OveroptimizationMonitor()
    saving = ModelCheckpoint(tmp_path / "all", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    game(whole, right_or_many_ones, save=[saving])
    game(resumed, right_or_many_ones, ckpt=tmp_path / "all" / "epoch=4.ckpt")
    assert resumed.evaluations == whole.evaluations
    assert [alarm.iteration for alarm in resumed.alarms] == [alarm.iteration for alarm in whole.alarms] == [5]
    # The best of both parts, though the second has a log folder of its own.
    assert resumed.best_model_score == whole.best_model_score
    assert Path(resumed.best_model_path).exists()


def test_a_metric_whose_minimum_is_best(game):
    monitor = OveroptimizationMonitor("val/completion_length", mode="min", min_fall=0.5)

    def many_ones(completions: list[str]) -> list[float]:
        return [float(text.count("1")) for text in completions]

    game(monitor, many_ones, epochs=12, lr=2e-3)
    (alarm,) = monitor.alarms
    assert alarm.figure > alarm.threshold


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "OveroptimizationMonitor: window must be a number"),
        ({"min_fall": -0.1}, "OveroptimizationMonitor: min_fall must be a number"),
        ({"mode": "best"}, "OveroptimizationMonitor: mode must be 'max' or 'min', got 'best'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        OveroptimizationMonitor(**options)


def test_a_run_without_held_out_prompts_is_refused(make_trainer, make_data, policy_dir):
    module = GRPOModule(policy_dir)
    trainer = make_trainer(callbacks=[OveroptimizationMonitor()], enable_checkpointing=True)
    with pytest.raises(ConfigurationError, match=r"compares the reward with val/accuracy: .* held-out prompts"):
        trainer.fit(module, make_data())
    assert module.policy is None
