"""Every rule of HealthMonitor: a real run that goes wrong in this way, and the alarms that it may raise besides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf import GRPOModule, PPOModule, RolloutDataModule
from lit_rlhf.callbacks import DynamicSampling, HealthMonitor, RolloutCallback
from lit_rlhf.callbacks.health import DEFAULT_RULES, Alarm
from lit_rlhf.engines.transformers import TransformersEngine
from lit_rlhf.rewards import MathAnswer

ROOT = Path(__file__).parents[2]
ADDER = str(ROOT / "checkpoints" / "arithmetic")
SUMS = str(ROOT / "recipes" / "quickstart" / "data" / "train.jsonl")
SUMMING: dict[str, Any] = {"policy": ADDER, "train": SUMS, "rewards": MathAnswer(), "max_new_tokens": 8}
# The tiny random policy seldom ends by itself, and a loss near 0 is normal.
HARMLESS = {"truncation", "near_zero_loss"}


@pytest.fixture
def alarms_of(make_trainer: Any, make_data: Any, policy_dir: str) -> Callable[..., dict[str, Alarm]]:
    """Train the tiny random policy and return the first alarm of each rule."""

    def run(
        epochs: int = 6,
        callbacks: tuple[Any, ...] = (),
        algorithm: Any = GRPOModule,
        module: dict[str, Any] | None = None,
        policy: str = policy_dir,
        **data: Any,
    ) -> dict[str, Alarm]:
        monitor = HealthMonitor()
        trainer = make_trainer(callbacks=[*callbacks, monitor], max_epochs=epochs)
        options = {"lr": 1e-3, **(module or {})}
        trainer.fit(algorithm(policy, **options), make_data(**{"group_size": 8, "val_samples": 0, **data}))
        return {alarm.rule: alarm for alarm in reversed(monitor.alarms)}

    return run


def check(alarms: dict[str, Alarm], rule: str, companions: set[str] = frozenset(), level: str = "warning") -> Alarm:
    """The alarm was raised, and none but those that may come with it."""
    assert rule in alarms, sorted(alarms)
    assert alarms.keys() <= {rule} | companions | HARMLESS
    assert alarms[rule].level == level
    return alarms[rule]


def count_ones(completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("1")) for text in completions]


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def has_first_digit(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(prompt[0] in text) for prompt, text in zip(prompts, completions, strict=True)]


def test_learning_rate_far_too_high(alarms_of):
    check(alarms_of(module={"lr": 0.1}), "kl_soaring", {"entropy_collapse", "duplicates", "dead_groups", "repetition"})


def test_many_large_steps_on_one_rollout(alarms_of):
    alarm = check(alarms_of(module={"lr": 1e-2}, passes=8), "clipping", {"kl_soaring"})
    assert "lower lr" in str(alarm)


def test_a_policy_that_stops_exploring(alarms_of):
    """No penalty, large steps, and a reward that no single answer earns."""
    options = {"train": SUMS, "rewards": has_first_digit, "prompts_per_iteration": 12, "max_new_tokens": 3, "passes": 4}
    companions = {"dead_groups", "duplicates", "constant_reward", "clipping"}
    alarms = alarms_of(10, module={"lr": 0.05, "kl_coef": 0.0}, **options)
    alarm = check(alarms, "entropy_collapse", companions)
    assert 0 <= alarm.figure < 0.2
    assert "of its first value" in alarm.finding


class OtherTemperature(RolloutCallback):
    """Takes the old log-probs at another temperature than the training pass does."""

    def on_rollout_end(self, trainer, module, rollout):
        return rollout.replace(old_log_probs=rollout.old_log_probs * 1.2)


def test_old_log_probs_that_are_not_the_policys(alarms_of):
    alarm = check(alarms_of(2, (OtherTemperature(),), steps_per_pass=2), "first_step_ratio", {"clipping", "kl_soaring"})
    assert alarm.iteration == 0


class StaleEngine(TransformersEngine):
    """Never notices that the policy learns."""

    def generate(self, policy, *args, **kwargs):
        self.weights = getattr(self, "weights", None) or copy.deepcopy(policy)
        return super().generate(self.weights, *args, **kwargs)


def test_an_engine_with_stale_weights(alarms_of):
    alarm = check(alarms_of(4, module={"lr": 1e-2}, engine=StaleEngine()), "sampler_gap")
    assert alarm.iteration > 0


def test_loss_of_zero_is_explained_once(alarms_of):
    alarms = alarms_of(8, module={"lr": 1e-4}, **SUMMING)
    alarm = check(alarms, "near_zero_loss", level="info", companions={"dead_groups"})
    assert "normal" in str(alarm)
    assert next(rule for rule in DEFAULT_RULES if rule.name == "near_zero_loss").once


def test_a_constant_reward(alarms_of):
    alarm = check(alarms_of(4, rewards=lambda completions, **columns: [0.5] * len(completions)), "constant_reward")
    assert (alarm.figure, alarm.iteration) == (0.0, 2)


def test_two_rewards_in_groups_of_four(alarms_of):
    options = {"rewards": has_first_digit, "group_size": 4}
    check(alarms_of(4, **options), "coarse_reward", {"dead_groups"})
    assert "coarse_reward" not in alarms_of(4, **{**options, "group_size": 8})


def test_dead_groups_that_nothing_replaces(alarms_of):
    def constant(completions, **columns):
        return [0.5] * len(completions)

    alarm = check(alarms_of(3, (DynamicSampling(max_attempts=1),), rewards=constant), "unfilled_rollout")
    assert alarm.figure == 0.0


def test_temperature_far_too_low(alarms_of):
    alarm = check(alarms_of(6, temperature=0.05, **SUMMING), "duplicates", {"constant_reward"})
    assert "raise temperature" in str(alarm)


def test_temperature_far_too_high(alarms_of):
    options = {**SUMMING, "prompts_per_iteration": 4, "temperature": 20.0}
    alarm = check(alarms_of(10, **options), "incoherent", {"constant_reward", "dead_groups"})
    assert "lower temperature" in str(alarm)


def test_prompts_that_are_mostly_too_hard(alarms_of):
    def one_prompt_can_be_solved(prompts, completions, **columns):
        return [float(p == "7+7=" and text[:1].isdigit()) for p, text in zip(prompts, completions, strict=True)]

    check(alarms_of(6, rewards=one_prompt_can_be_solved), "dead_groups", {"constant_reward"})


def test_completions_that_are_cut(alarms_of):
    alarms = alarms_of(4, **{**SUMMING, "max_new_tokens": 2})
    assert check(alarms, "truncation", {"dead_groups", "constant_reward"}).figure > 0.9


def test_a_reward_for_length(alarms_of):
    companions = {"kl_soaring", "repetition", "dead_groups"}
    check(alarms_of(6, rewards=length, max_new_tokens=40, module={"lr": 3e-2}), "length_growth", companions)


def test_a_reward_for_repetition(alarms_of):
    companions = {"kl_soaring", "length_growth", "entropy_collapse", "dead_groups", "duplicates"}
    check(alarms_of(7, rewards=count_ones, max_new_tokens=24, module={"lr": 3e-2}), "repetition", companions)


CRITIC = {"algorithm": PPOModule, "group_size": 1, "prompts_per_iteration": 24, "passes": 4}


def test_a_critic_that_blows_up(alarms_of):
    module = {"lr": 1e-6, "critic_lr": 1.0}
    check(alarms_of(4, rewards=has_first_digit, module=module, **CRITIC), "value_blow_up")


def test_a_critic_that_stays_worse_than_a_constant(alarms_of):
    module = {"lr": 1e-6, "critic_lr": 1.0}
    alarms = alarms_of(10, rewards=has_first_digit, module=module, **CRITIC)
    assert check(alarms, "harmful_critic", {"value_blow_up"}).iteration == 9


def test_every_rule_has_a_run(request):
    """A rule that ships without a run that raises it would be a guess."""
    source = Path(__file__).read_text(encoding="utf-8")
    assert [rule.name for rule in DEFAULT_RULES if f', "{rule.name}"' not in source] == []


def test_a_healthy_run_raises_no_warning(make_trainer):
    """The quickstart with a quarter of its prompts, until most groups are solved."""
    monitor = HealthMonitor()
    data = RolloutDataModule(SUMS, rewards=MathAnswer(), prompts_per_iteration=16, max_new_tokens=8, seed=1)
    make_trainer(callbacks=[monitor], max_epochs=25).fit(GRPOModule(ADDER, lr=3e-4), data)
    assert [alarm for alarm in monitor.alarms if alarm.level == "warning"] == []
    assert monitor.history.is_solved
