"""Episodes, levels, a user's own rules, where alarms are told, and what outlives a checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_rlhf import GRPOModule, SFTModule, SupervisedDataModule
from lit_rlhf.callbacks import HealthMonitor, HealthRule, RolloutCallback
from lit_rlhf.callbacks.health import DEFAULT_RULES
from lit_rlhf.errors import ConfigurationError

OTHERS = [rule.name for rule in DEFAULT_RULES if rule.name != "constant_reward"]


class Script(RolloutCallback):
    """Rewards by iteration: ``0`` or ``1`` for all, ``x`` for some of each."""

    def __init__(self, script: str) -> None:
        self.script = script

    def on_rewards_end(self, trainer, module, rollout):
        kind = self.script[trainer.datamodule.iteration]
        rewards = torch.arange(len(rollout)) % 2 if kind == "x" else torch.full((len(rollout),), int(kind))
        return rollout.replace(rewards=rewards.float())


@pytest.fixture
def follow(fit):
    """Run a script with one rule on; its alarms."""

    def run(script: str, **options: Any) -> list[tuple[int, str]]:
        monitor = HealthMonitor(silence=OTHERS)
        fit(None, [monitor, Script(script)], max_epochs=len(script), **options)
        return [(alarm.iteration, alarm.level) for alarm in monitor.alarms]

    return run


def test_once_per_episode_and_armed_again_when_healthy(follow):
    # The median of three iterations; a single healthy iteration does not end an episode, a single bad one starts none.
    assert follow("111111x111") == [(2, "warning")]
    assert follow("x1xxx1xx") == []
    assert follow("111xxxxx0000") == [(2, "warning"), (9, "warning")]


def test_a_solved_task_is_no_fault(follow):
    assert follow("x111111") == [(2, "info")]
    assert follow("x000000") == [(2, "warning")]


def test_an_info_that_becomes_a_warning_is_told_again(follow):
    assert follow("x1111110000") == [(2, "info"), (9, "warning")]


def test_a_rule_says_nothing_where_another_says_it(fit):
    monitor = HealthMonitor()
    fit(None, [monitor, Script("00000000")], max_epochs=8)
    assert {alarm.rule for alarm in monitor.alarms} & {"constant_reward", "dead_groups"} == {"constant_reward"}
    alone = HealthMonitor(silence=["constant_reward"])
    fit(None, [alone, Script("00000000")], max_epochs=8)
    assert "dead_groups" in {alarm.rule for alarm in alone.alarms}


def test_no_alarm_about_groups_where_none_are_compared(fit):
    monitor = HealthMonitor()
    fit(None, [monitor, Script("0x0x0x0x")], max_epochs=8, module={"baseline": "none", "scale_by_std": False})
    assert not {"dead_groups", "coarse_reward"} & {alarm.rule for alarm in monitor.alarms}


# A user's own rules

SHORT = HealthRule("short", "completion/length", "below", 1000, "Write more.", window=2)


def test_rules_are_added_changed_and_silenced():
    monitor = HealthMonitor(
        rules=[SHORT, replace(DEFAULT_RULES[0], window=9)], silence=["truncation"], thresholds={"short": 3.5}
    )
    rules = {rule.name: rule for rule in monitor.rules}
    assert rules.keys() == {rule.name for rule in DEFAULT_RULES} - {"truncation"} | {"short"}
    assert rules["short"] == replace(SHORT, threshold=3.5)
    assert rules[DEFAULT_RULES[0].name].window == 9


def test_a_rule_of_ones_own(fit):
    monitor = HealthMonitor(rules=[SHORT])
    module = fit(None, [monitor], max_epochs=3)
    (alarm,) = [alarm for alarm in monitor.alarms if alarm.rule == "short"]
    assert (alarm.iteration, alarm.step, alarm.level) == (1, 2, "warning")
    assert alarm.finding == f"completion/length is {alarm.figure:.3g}, under 1000 (median of 2 iterations)"
    assert str(alarm).endswith("Write more.")
    assert module.trainer.global_step == 3


def test_a_held_out_metric_counts_once_per_validation(fit, make_data, rows):
    rule = HealthRule("unsure", "val/accuracy", "below", 2, "-", window=2)
    monitor = HealthMonitor(rules=[rule])
    fit(make_data(val=rows[:2]), [monitor], max_epochs=7, check_val_every_n_epoch=3)
    assert [alarm.iteration for alarm in monitor.alarms if alarm.rule == "unsure"] == [5]


def test_from_yaml():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    rule = {"name": "short", "signal": "completion/length", "when": "below", "threshold": 3, "advice": "Write more."}
    options = {"rules": [rule], "silence": ["truncation"], "thresholds": {"kl_soaring": 0.5}}
    entry = {"class_path": "lit_rlhf.callbacks.HealthMonitor", "init_args": options}
    (monitor,) = parser.instantiate(parser.parse_object({"callbacks": [entry]})).callbacks
    rules = {rule.name: rule for rule in monitor.rules}
    assert rules["short"] == HealthRule("short", "completion/length", "below", 3.0, "Write more.")
    assert rules["kl_soaring"].threshold == 0.5
    assert "truncation" not in rules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"silence": ["kl"]}, "HealthMonitor: silence names kl, but the rules are kl_soaring, clipping"),
        ({"thresholds": {"typo": 1.0}}, "HealthMonitor: thresholds names typo"),
        ({"rules": [SHORT, SHORT]}, "HealthMonitor: rules has short more than once"),
        ({"thresholds": {"kl_soaring": float("nan")}}, "HealthRule kl_soaring: threshold must be a number"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        HealthMonitor(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"when": "over"}, "HealthRule short: when must be one of above, below, got 'over'"),
        ({"level": "error"}, "HealthRule short: level must be one of warning, info, got 'error'"),
        ({"window": 0}, "HealthRule short: window must be a number"),
    ],
)
def test_bad_rules(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(SHORT, **changes)


def test_a_module_without_rollouts_is_refused(make_trainer, policy_dir):
    data = SupervisedDataModule([{"prompt": "1+1=", "completion": "2"}])
    with pytest.raises(ConfigurationError, match="HealthMonitor watches rollouts"):
        make_trainer(callbacks=[HealthMonitor()]).fit(SFTModule(policy_dir), data)


# Where alarms are told


def test_console_tensorboard_and_file(fit, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    monitor = HealthMonitor(silence=OTHERS)
    fit(None, [monitor, Script("111xxxxx")], max_epochs=8, logger=logger, log_every_n_steps=1)
    (alarm,) = monitor.alarms
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("health warning constant_reward (iteration 2): reward/range is 0, under 1e-06") == 1
    (event,) = EventAccumulator(logger.log_dir).Reload().Tensors("health/text_summary")
    assert event.step == 3
    assert alarm.advice in event.tensor_proto.string_val[0].decode()
    lines = [json.loads(line) for line in (tmp_path / "lightning_logs/version_0/health.jsonl").open(encoding="utf-8")]
    assert [(line["event"], line["rule"], line["iteration"], line["step"]) for line in lines] == [
        ("alarm", "constant_reward", 2, 3),
        ("recovery", "constant_reward", 6, 7),
    ]
    assert {key: lines[0][key] for key in ("level", "signal", "figure", "threshold", "finding", "advice")} == {
        "level": "warning",
        "signal": "reward/range",
        "figure": 0.0,
        "threshold": 1e-6,
        "finding": alarm.finding,
        "advice": alarm.advice,
    }


def test_no_file_without_a_logger_or_an_alarm(fit, tmp_path):
    fit(None, [HealthMonitor(silence=OTHERS), Script("111")], max_epochs=3)
    fit(None, [HealthMonitor(silence=OTHERS), Script("xxx")], max_epochs=3, logger=CSVLogger(tmp_path / "csv"))
    assert not list(tmp_path.rglob("health.jsonl"))


def test_there_by_default_and_changes_nothing(fit, weights):
    module = fit(max_epochs=3)
    assert sum(isinstance(callback, HealthMonitor) for callback in module.trainer.callbacks) == 1
    own = HealthMonitor(rules=[SHORT])
    other = fit(None, [own], max_epochs=3)
    assert [callback for callback in other.trainer.callbacks if isinstance(callback, HealthMonitor)] == [own]
    assert torch.equal(weights(module), weights(other))


# Checkpoints


@pytest.mark.parametrize("stop_after", [1, 2, 4, 6])
def test_a_resumed_run_neither_repeats_nor_forgets(make_trainer, make_data, policy_dir, tmp_path, stop_after):
    script = "x11111000xxx000"

    def run(folder, epochs, ckpt=None):
        monitor = HealthMonitor()
        saving = ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [saving, monitor, Script(script)]
        trainer = make_trainer(callbacks=callbacks, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(GRPOModule(policy_dir, lr=1e-3, warmup_ratio=0.0), make_data(), ckpt_path=ckpt)
        return monitor

    whole = run("whole", len(script))
    rules = [(alarm.rule, alarm.iteration, alarm.level) for alarm in whole.alarms if alarm.rule == "constant_reward"]
    assert [level for *_, level in rules] == ["info", "warning", "warning"]
    resumed = run("again", len(script), tmp_path / "whole" / f"epoch={stop_after}.ckpt")
    assert resumed.alarms == whole.alarms
    assert resumed.state_dict() == whole.state_dict()


def test_the_documentation_has_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text(encoding="utf-8")
    for rule in DEFAULT_RULES:
        row = rf"^\| `{rule.name}`.* \| `{re.escape(rule.signal)}` \| (over|under) .* \| {rule.window} \|$"
        found = re.search(row, page, re.MULTILINE)
        assert found, rule
        assert (found[1] == "over") == (rule.when == "above"), rule
