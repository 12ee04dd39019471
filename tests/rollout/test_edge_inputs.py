"""Rollouts from which little or nothing can be learned."""

from __future__ import annotations

import math

import pytest
import torch

from lit_rlhf.callbacks import RolloutCallback

HOOKS = ["on_rewards_end", "on_rollout_end", "on_advantages_end"]


def acting(hook, action):
    """A callback that does something to the rollout in one of the hooks."""
    return type("Acting", (RolloutCallback,), {hook: lambda self, trainer, module, rollout: action(rollout)})()


def base_weights(policy):
    from transformers import AutoModelForCausalLM

    return torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(policy).parameters()])


@pytest.fixture
def assert_sane(watch, weights):
    """Every number logged is finite and the weights are too."""

    def check(module, steps=2):
        assert module.trainer.global_step == steps
        assert {name: value for name, value in watch.final.items() if not math.isfinite(value)} == {}
        assert weights(module).isfinite().all()

    return check


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_every_group_is_dead(fit, make_data, watch, assert_sane, placement):
    data = make_data(rewards=lambda completions: [0.7] * len(completions))
    module = fit(data, module={"kl_placement": placement})
    assert_sane(module)
    assert watch.final["group/effective_ratio"] == 0.0
    assert watch.final["reward"] == pytest.approx(0.7)
    assert watch.final["policy/dead_steps"] == (1.0 if placement == "reward" else 0.0)
    assert (data.rollout.advantages == 0).all()


def test_every_row_is_truncated(fit, make_data, eos_policy, watch, assert_sane, weights):
    policy = eos_policy(at_once=False)
    module = fit(make_data(max_new_tokens=1), policy=policy)
    assert_sane(module)
    for rollout in watch.rollouts:
        assert rollout.completion_lengths.tolist() == [1] * 24
        assert not rollout.finished.any()
    assert watch.final["completion/truncated"] == 1.0
    assert watch.final["completion/length"] == 1.0
    assert "completion/finished_length" not in watch.final  # a mean over nothing is not logged
    assert not torch.equal(weights(module), base_weights(policy))


def test_every_row_ends_at_once(fit, make_data, eos_policy, watch, assert_sane):
    module = fit(make_data(), policy=eos_policy(at_once=True))
    assert_sane(module)
    for rollout in watch.rollouts:
        assert rollout.completion_lengths.tolist() == [1] * 24
        assert rollout.completions == ("",) * 24
        assert rollout.finished.all()
    assert watch.final["completion/truncated"] == 0.0
    assert watch.final["completion/finished_length"] == 1.0
    assert watch.final["group/distinct"] == 1.0


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_drops_rows(fit, make_data, watch, assert_sane, hook):
    """The first completion of every prompt goes; the denominator counts what is left."""
    drop = acting(hook, lambda rollout: rollout.select([row for row in range(len(rollout)) if row % 4]))
    assert_sane(fit(make_data(micro_batch_size=5), [drop]))
    for number, rollout in enumerate(watch.rollouts):
        assert len(rollout) == 18
        assert watch.denominators[4 * number] == float(rollout.completion_lengths.sum())
        group_sums = rollout.advantages[:, 0].reshape(6, 3).sum(1)
        if hook == "on_advantages_end":
            assert group_sums.abs().max() > 0.1
        else:  # the baseline is that of the rows that are left
            assert group_sums.abs().max() < 1e-5
    assert watch.sizes == [5, 5, 5, 3] * 2


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_drops_a_whole_group(fit, make_data, watch, assert_sane, hook):
    drop = acting(hook, lambda rollout: rollout.select(rollout.group_index != 2))
    assert_sane(fit(make_data(steps_per_pass=6), [drop]), steps=12)
    assert [len(rollout) for rollout in watch.rollouts] == [20, 20]
    assert watch.denominators.count(0.0) == 2
    assert watch.final["policy/dead_steps"] >= 1 / 6


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_drops_everything(fit, make_data, watch, assert_sane, weights, policy_dir, hook):
    module = fit(make_data(passes=2), [acting(hook, lambda rollout: rollout.select([]))], module={"weight_decay": 0.5})
    assert_sane(module, steps=4)
    assert watch.denominators == [0.0] * 4
    assert watch.final["policy/dead_steps"] == 1.0
    assert torch.equal(weights(module), base_weights(policy_dir))


def test_rows_that_come_back_in_another_order(fit, make_data, watch, weights):
    """What is learned does not depend on the order of the rows."""
    plain = weights(fit(make_data(), max_epochs=1))
    turned = acting("on_rewards_end", lambda rollout: rollout.select(list(reversed(range(len(rollout))))))
    assert torch.allclose(weights(fit(make_data(), [turned], max_epochs=1)), plain, atol=1e-6)
    assert watch.rollouts[1].completions == watch.rollouts[0].completions[::-1]


def test_a_callback_changes_rewards(fit, make_data, watch):
    pattern = torch.tensor([2.0, 4.0, 6.0, 8.0]).repeat(6)
    change = acting("on_rewards_end", lambda rollout: rollout.replace(rewards=pattern))
    fit(make_data(), [change], module={"kl_coef": 0.0})
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / (5**0.5 + 1e-4)
    assert torch.allclose(watch.rollouts[0].advantages[:, 0], expected.repeat(6))
    assert watch.final["reward"] == 5.0


def test_tokens_in_holes_teach_nothing(fit, make_data, watch, weights, assert_sane):
    def holes(advantage_in_hole):
        def action(rollout):
            mask = rollout.completion_mask.clone()
            mask[:, 0] = rollout.completion_lengths < 2
            advantages = rollout.advantages.clone()
            advantages[~mask] = advantage_in_hole
            return rollout.replace(completion_mask=mask, advantages=advantages)

        return acting("on_advantages_end", action)

    one = fit(make_data(passes=2), [holes(0.0)], max_epochs=1)
    assert_sane(one)
    other = fit(make_data(passes=2), [holes(1000.0)], max_epochs=1)
    assert torch.equal(weights(one), weights(other))
    rollout = watch.rollouts[0]
    assert watch.denominators[0] == float(rollout.completion_mask.sum()) < float(rollout.completion_lengths.sum())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_reward_function_abstains_everywhere(fit, make_data, watch, assert_sane, weights, policy_dir, aggregation):
    module = fit(
        make_data(rewards=lambda completions: [None] * len(completions)),
        module={"weight_decay": 0.5, "loss_aggregation": aggregation},
    )
    assert_sane(module)
    assert watch.final["reward/missing"] == 1.0
    assert "reward" not in watch.final
    assert watch.final["loss"] == 0.0
    assert watch.final["policy/dead_steps"] == 1.0
    assert torch.equal(weights(module), base_weights(policy_dir))


def test_a_reward_function_that_raises_abstains_if_asked_to(fit, make_data, watch, assert_sane):
    def only_short_prompts(prompts, completions):
        if any(len(prompt) > 4 for prompt in prompts):
            raise ValueError("too long for me")
        return [len(set(text)) / 6 for text in completions]

    assert_sane(fit(make_data(rewards=only_short_prompts, on_reward_error="abstain")))
    short = torch.tensor([len(prompt) <= 4 for prompt in watch.rollouts[0].prompts])
    assert short.sum() == 8
    assert torch.equal(watch.rollouts[0].scored_mask, short)
    assert (watch.rollouts[0].advantages[~short] == 0).all()
    assert watch.final["reward/missing"] == pytest.approx(16 / 24)
