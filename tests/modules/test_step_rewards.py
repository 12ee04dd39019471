"""Rewards of single tokens: placed where they were earned, by PPO and by GRPO's return-to-go."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import gae_advantages, group_advantages, return_to_go_advantages, reward_to_go


def digit_steps(completions: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
    """0.5 for each even token id, at its token."""
    return [[0.5 if token % 2 == 0 else 0.0 for token in ids] for ids in completion_ids]


def length_outcome(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def expected_steps(rollout: Any) -> torch.Tensor:
    even = (rollout.completion_ids % 2 == 0) & rollout.completion_mask
    return 0.5 * even.float()


def test_the_batch_knows_outcome_and_steps_apart(fit, make_data, watch):
    fit(make_data(rewards=[digit_steps, length_outcome], reward_weights=[2.0, 1.0]), max_epochs=1)
    rollout = watch.rollouts[0]
    steps = expected_steps(rollout)
    assert torch.equal(rollout.token_rewards, 2 * steps)
    outcome = torch.tensor([float(len(text)) for text in rollout.completions])
    assert torch.allclose(rollout.rewards, outcome + 2 * steps.sum(1))
    assert torch.allclose(rollout.reward_components[:, 0], steps.sum(1))
    assert rollout.outcome_mask.all()


def test_ppo_puts_each_reward_at_its_token(make_trainer, make_data, policy_dir, watch):
    module = PPOModule(policy_dir, kl_coef=0.0, whiten_advantages=False, gae_lambda=1.0)
    data = make_data(rewards=[digit_steps, length_outcome])
    make_trainer(callbacks=[watch]).fit(module, data)
    rollout = watch.rollouts[0]
    rewards = expected_steps(rollout)
    last = (rollout.completion_lengths - 1)[:, None]
    outcome = torch.tensor([float(len(text)) for text in rollout.completions])
    rewards = rewards.scatter_add(1, last, outcome[:, None])
    expected = gae_advantages(rewards, rollout.values, rollout.completion_mask, 1.0, 1.0)
    assert torch.allclose(rollout.advantages, expected, atol=1e-5)
    assert not torch.allclose(rollout.advantages[:, 0], rollout.advantages[:, 1])


def test_grpo_return_to_go(make_trainer, make_data, policy_dir, watch):
    options = {"kl_coef": 0.2, "lr": 1e-2, "scale_by_std": False}
    module = GRPOModule(policy_dir, decomposition="return_to_go", **options)
    make_trainer(callbacks=[watch], max_epochs=2).fit(module, make_data(rewards=[digit_steps, length_outcome]))
    rollout = watch.rollouts[1]
    mask = rollout.completion_mask
    kl = torch.where(mask, rollout.old_log_probs - rollout.ref_log_probs, 0.0)
    outcome = torch.tensor([float(len(text)) for text in rollout.completions])
    for row in range(len(rollout)):
        group = rollout.group_index == rollout.group_index[row]
        per_token = expected_steps(rollout) - 0.2 * kl
        whole = outcome + per_token.sum(1)
        for t in range(int(rollout.completion_lengths[row])):
            expected = outcome[row] + per_token[row, t:].sum() - whole[group].mean()
            assert rollout.advantages[row, t] == pytest.approx(float(expected), abs=1e-4)
    assert (rollout.advantages[~mask] == 0).all()


def test_the_first_token_has_the_sequence_advantage():
    torch.manual_seed(3)
    mask = torch.rand(8, 5) < 0.8
    mask[:, 0] = True
    group = torch.arange(8) // 4
    to_go = torch.randn(8, 1) + reward_to_go(torch.randn(8, 5), mask)
    scored = torch.ones(8, dtype=torch.bool)
    scored[2] = False
    for options in ({}, {"baseline": "median"}, {"baseline": "leave_one_out", "scale": "none"}, {"scale": "batch"}):
        by_token = return_to_go_advantages(to_go, group, mask, scored, **options)
        assert torch.allclose(by_token[:, 0], group_advantages(to_go[:, 0], group, scored, **options), atol=1e-6)
        assert (by_token[2] == 0).all()


def test_equal_sums_of_unequal_steps_are_not_dead(make_trainer, make_data, policy_dir, watch):
    def same_sum(completion_ids: list[list[int]]) -> list[list[float]]:
        """1 in all, at the first or at the last token."""
        rewards = []
        for row, ids in enumerate(completion_ids):
            steps = [0.0] * len(ids)
            steps[0 if row % 2 else -1] = 1.0
            rewards.append(steps)
        return rewards

    for decomposition, alive in (("sequence", False), ("return_to_go", True)):
        module = GRPOModule(policy_dir, kl_coef=0.0, scale_by_std=False, decomposition=decomposition)
        make_trainer(callbacks=[watch]).fit(module, make_data(rewards=[same_sum]))
        assert bool((watch.rollouts[-1].advantages != 0).any()) is alive


def exact_expectation(baseline: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected surrogate gradient over all groups of two 2-token completions, and the exact policy gradient."""
    torch.manual_seed(0)
    first = torch.randn(3, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    step_reward = torch.randn(3, 3, 2, dtype=torch.float64)
    step_reward[:, :, 0] = step_reward[:, :1, 0]  # what the first token earns does not depend on the second
    sequences = list(itertools.product(range(3), range(3)))

    def log_probs(a: int, b: int) -> torch.Tensor:
        return torch.stack([first.log_softmax(0)[a], second[a].log_softmax(0)[b]])

    value = sum(log_probs(a, b).sum().exp() * step_reward[a, b].sum() for a, b in sequences)
    exact = torch.autograd.grad(value, [first, second])
    surrogate = torch.zeros((), dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    for one, two in itertools.product(sequences, repeat=2):
        rewards = torch.stack([step_reward[one], step_reward[two]])
        advantages = return_to_go_advantages(
            reward_to_go(rewards, mask), torch.zeros(2, dtype=torch.long), mask, baseline=baseline, scale="none"
        ).double()
        lp = torch.stack([log_probs(*one), log_probs(*two)])
        probability = lp.detach().sum().exp()
        surrogate = surrogate + probability * (lp * advantages).sum() / 2
    found = torch.autograd.grad(surrogate, [first, second])
    return torch.cat([g.flatten() for g in found]), torch.cat([g.flatten() for g in exact])


def test_expected_gradient_is_the_policy_gradient():
    """Leave-one-out is unbiased; the group mean scales the gradient by (G - 1) / G."""
    found, exact = exact_expectation("leave_one_out")
    assert torch.allclose(found, exact, atol=1e-6)
    found, exact = exact_expectation("mean")
    assert torch.allclose(found, exact / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0]], "row 0 has 1 token rewards, but the completion has"),
        ([["a"] * 9], "row 0 has 9 token rewards"),
    ],
)
def test_a_wrong_number_of_token_rewards_is_refused(make_trainer, make_data, policy_dir, values, message):
    def wrong(completions: list[str]) -> list[Any]:
        return values * len(completions)

    with pytest.raises(Exception, match=message):
        make_trainer().fit(GRPOModule(policy_dir), make_data(rewards=[wrong], max_new_tokens=6))


def test_unknown_decomposition(policy_dir):
    with pytest.raises(ConfigurationError, match="decomposition must be one of sequence, return_to_go, got 'steps'"):
        GRPOModule(policy_dir, decomposition="steps")


def test_equal_returns_of_unequal_steps_are_not_blown_up():
    to_go = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    group, mask = torch.zeros(2, dtype=torch.long), torch.ones(2, 2, dtype=torch.bool)
    dead = torch.ones(2, dtype=torch.bool)
    assert return_to_go_advantages(to_go, group, mask, unscaled=dead).tolist() == [[0.0, -1.0], [0.0, 0.0]]


def test_kl_noise_does_not_scale_equal_returns(make_trainer, make_data, policy_dir, watch):
    def one_point(completion_ids: list[list[int]]) -> list[list[float]]:
        return [[float(place == row % len(ids)) for place in range(len(ids))] for row, ids in enumerate(completion_ids)]

    module = GRPOModule(policy_dir, lr=1e-2, kl_coef=0.04, decomposition="return_to_go")
    make_trainer(callbacks=[watch], max_epochs=3).fit(module, make_data(rewards=[one_point]))
    assert all(rollout.advantages.abs().max() < 3 for rollout in watch.rollouts)
    assert watch.final["kl"] != 0.0
