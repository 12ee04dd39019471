from __future__ import annotations

import logging

import pytest
import torch

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.callbacks import DynamicSampling, RolloutCallback, StdThresholdMask
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import dead_groups


@pytest.fixture
def sums():
    """Twenty-four prompts: of every four the first two are always, the third is never and the last is half solved."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 16) for b in range(4)]


@pytest.fixture
def partly():
    """A reward that differs inside the groups of the prompts ending in 3= alone."""

    def reward(prompts, completions):
        return [
            float(number % 2) if prompt.endswith("3=") else float(prompt.endswith(("0=", "1=")))
            for number, prompt in enumerate(prompts)
        ]

    return reward


@pytest.fixture
def sparse(make_data, sums, partly):
    """Data of which a quarter of the prompts teaches something."""

    def make(**options):
        return make_data(sums, rewards=partly, **{"prompts_per_iteration": 8, **options})

    return make


def no_group_is_dead(rollout):
    return not dead_groups(rollout.rewards, rollout.group_index, rollout.scored_mask).any()


def test_dead_groups_are_replaced_by_new_prompts(fit, sparse, watch):
    fit(sparse(), [DynamicSampling(token_budget=10_000, max_attempts=10)], max_epochs=1)
    (rollout,) = watch.rollouts
    assert no_group_is_dead(rollout)
    # All six prompts that teach something: the data hold no more for the eight places.
    assert sorted(set(rollout.prompts)) == sorted(f"{a}+3=" for a in range(10, 16))
    groups = rollout.group_index.tolist()
    assert all(groups.count(group) == 4 for group in groups)
    assert max(groups) < 8
    for group in set(groups):
        rows = rollout.group_index == group
        assert len(set(rollout.prompt_index[rows].tolist())) == 1
    assert watch.final["group/kept"] == 6 / 8
    assert watch.final["group/redrawn"] == 16
    assert watch.final["group/dead"] == 18
    assert watch.final["group/effective_ratio"] == 1


def test_tokens_are_counted(fit, sparse, watch):
    fit(sparse(), [DynamicSampling()], max_epochs=2)
    kept = sum(int(rollout.completion_lengths.sum()) for rollout in watch.rollouts)
    assert watch.final["tokens/generated"] == kept + watch.final["tokens/discarded"]
    trained = sum(int((r.completion_lengths + r.prompt_lengths).sum()) for r in watch.rollouts)
    assert watch.final["tokens/trained"] == trained


@pytest.mark.parametrize("groups", [1, 3])
def test_the_budget_is_never_exceeded(fit, make_data, sums, watch, groups):
    """All groups are dead, so each attempt spends what there is."""
    data = make_data(sums, rewards=lambda completions: [0.7] * len(completions), prompts_per_iteration=4)
    budget = groups * 4 * 6 + 5
    fit(data, [DynamicSampling(token_budget=budget, max_attempts=50)], max_epochs=1)
    first_draw = 4 * 4 * 6
    redrawn = watch.final["tokens/generated"] - first_draw
    assert groups <= watch.final["group/redrawn"]
    assert watch.final["tokens/discarded"] == watch.final["tokens/generated"]
    assert redrawn <= budget
    assert len(watch.rollouts[0]) == 0
    assert watch.final["group/kept"] == 0
    assert watch.final["policy/dead_steps"] == 1


def test_attempts_are_limited(fit, sparse, watch):
    fit(sparse(prompts_per_iteration=2), [DynamicSampling(token_budget=10_000, max_attempts=1)], max_epochs=1)
    assert watch.final["group/redrawn"] <= 2


def test_the_same_prompt_again(fit, make_data, rows, watch):
    """Right is what starts with a digit: some groups agree by chance, and not at the next attempt."""

    def first_digit(completions):
        return [float(text[:1].isdigit()) for text in completions]

    def dead_prompts(callbacks):
        fit(make_data(rows, rewards=first_digit, group_size=3), callbacks, max_epochs=1)
        rollout = watch.rollouts.pop()
        dead = dead_groups(rollout.rewards, rollout.group_index)
        return rollout, {prompt for prompt, is_dead in zip(rollout.prompts, dead.tolist(), strict=True) if is_dead}

    plain, dead = dead_prompts([])
    again, none = dead_prompts([DynamicSampling("same_prompt", token_budget=5000, max_attempts=30)])
    assert dead
    assert not none
    assert set(again.prompts) == set(plain.prompts)
    assert watch.final["group/kept"] == 1
    for prompt in set(plain.prompts) - dead:  # who was alive is as before
        texts = [[t for p, t in zip(r.prompts, r.completions, strict=True) if p == prompt] for r in (plain, again)]
        assert texts[0] == texts[1]


def test_replaced_by_nothing_the_iteration_goes_on_with_fewer(fit, sparse, watch):
    fit(sparse(), [DynamicSampling("nothing")], max_epochs=1)
    (fewer,) = watch.rollouts
    fit(sparse(), max_epochs=1)
    plain = watch.rollouts[1]
    alive = ~dead_groups(plain.rewards, plain.group_index)
    assert 0 < alive.sum() < len(alive)
    assert fewer.completions == plain.select(alive).completions
    assert watch.denominators == [float(fewer.completion_mask.sum()), float(plain.completion_mask.sum())]


def test_the_threshold_is_the_masks(fit, make_data, watch):
    """With a threshold above every deviation all groups are dead."""
    fit(make_data(), [DynamicSampling("nothing"), StdThresholdMask(10.0)], max_epochs=1)
    assert len(watch.rollouts[0]) == 0


class AlwaysRight(RolloutCallback):
    """Re-scores: what was a living group before is dead now."""

    def on_rewards_end(self, trainer, module, rollout):
        solved = torch.tensor([prompt.startswith("15") for prompt in rollout.prompts], dtype=torch.bool)
        return rollout.replace(rewards=torch.where(solved, 1.0, rollout.rewards))


@pytest.mark.parametrize("first", [True, False])
def test_other_callbacks_re_score_what_is_drawn_again(fit, sparse, watch, first):
    callbacks = [AlwaysRight(), DynamicSampling(token_budget=10_000, max_attempts=10)]
    fit(sparse(), callbacks if first else callbacks[::-1], max_epochs=1)
    assert sorted(set(watch.rollouts[0].prompts)) == sorted(f"{a}+3=" for a in range(10, 15))


def test_later_iterations_draw_what_they_would_have_drawn(fit, sparse):
    """The budget of one iteration does not shift the prompts of the next."""

    class Drawn(RolloutCallback):
        runs_first = True

        def __init__(self):
            self.prompts = []

        def on_rewards_end(self, trainer, module, rollout):
            if trainer.datamodule.iteration == len(self.prompts):
                self.prompts.append(rollout.prompts)

    plain, redrawing = Drawn(), Drawn()
    fit(sparse(), [plain], max_epochs=3)
    fit(sparse(), [redrawing, DynamicSampling()], max_epochs=3)
    assert plain.prompts == redrawing.prompts


def test_a_group_that_another_callback_drops_is_not_drawn_again(fit, sparse, watch):
    class Drop(RolloutCallback):
        def on_rewards_end(self, trainer, module, rollout):
            return rollout.select(torch.tensor(["+3=" in prompt for prompt in rollout.prompts], dtype=torch.bool))

    fit(sparse(), [Drop(), DynamicSampling()], max_epochs=1)
    assert watch.final["group/dead"] == watch.final["group/redrawn"] == 0
    assert no_group_is_dead(watch.rollouts[0])


def test_resume(resumed_equals_uninterrupted, sparse):
    logged, _ = resumed_equals_uninterrupted(
        lambda: [DynamicSampling(token_budget=150)], lambda: sparse(micro_batch_size=5, passes=2)
    )
    assert logged[-1]["tokens/discarded"] > logged[0]["tokens/discarded"] > 0
    assert all(metrics["group/redrawn"] > 0 for metrics in logged)


def test_without_groups_it_does_nothing_and_says_so_once(make_trainer, sparse, policy_dir, watch, caplog):
    module = PPOModule(policy_dir, lr=1e-3, critic="shared")
    with caplog.at_level(logging.INFO):
        make_trainer(callbacks=[DynamicSampling(), watch], max_epochs=2).fit(module, sparse(group_size=1))
    assert caplog.text.count("PPOModule compares no groups, nothing is drawn again") == 1
    assert all(len(rollout) == 8 for rollout in watch.rollouts)


@pytest.mark.distributed
@pytest.mark.parametrize("replace_with", ["new_prompt", "same_prompt", "nothing"])
def test_two_ranks_draw_what_one_does(tmp_path, make_trainer, sparse, policy_dir, replace_with):
    """Five prompts: the shares of the ranks differ, and so may the number of their dead groups."""

    class Save(RolloutCallback):
        def __init__(self):
            self.rows, self.redrawn = [], []

        def on_advantages_end(self, trainer, module, rollout):
            for place, completion in zip(rollout.prompt_index.tolist(), rollout.completions, strict=True):
                self.rows.append((trainer.datamodule.iteration, place, completion))

        def on_train_end(self, trainer, pl_module):
            weights = torch.cat([p.detach().flatten() for p in pl_module.policy.parameters()])
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            counts = {name: metrics[name] for name in ("group/dead", "group/redrawn", "group/kept", "tokens/discarded")}
            torch.save((self.rows, weights, counts), tmp_path / f"{trainer.world_size}-{trainer.global_rank}")

    for devices in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        callbacks = [DynamicSampling(replace_with, token_budget=200), Save()]
        trainer = make_trainer(callbacks=callbacks, max_epochs=3, **devices)
        trainer.fit(GRPOModule(policy_dir, lr=1e-4), sparse(prompts_per_iteration=5, micro_batch_size=4))
    (rows, weights, counts), first, second = (torch.load(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    assert sorted(first[0] + second[0]) == sorted(rows)
    assert torch.equal(first[1], second[1])
    assert torch.allclose(first[1], weights, atol=1e-5)
    assert first[2] == second[2] == counts
    assert (counts["group/redrawn"] > 0) == (replace_with != "nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replace_with": "other"}, "replace_with must be 'new_prompt', 'same_prompt' or 'nothing', got 'other'"),
        ({"token_budget": 0}, "DynamicSampling: token_budget must be a number in"),
        ({"max_attempts": 0}, "DynamicSampling: max_attempts must be a number in"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DynamicSampling(**options)


def test_a_budget_below_one_group_is_refused(make_trainer, make_data, policy_dir):
    module = GRPOModule(policy_dir)
    with pytest.raises(ConfigurationError, match="token_budget=23 does not pay for one group, which may cost 24"):
        make_trainer(callbacks=[DynamicSampling(token_budget=23)]).fit(module, make_data())
    assert module.policy is None
