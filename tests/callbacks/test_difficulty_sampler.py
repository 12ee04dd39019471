from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import DifficultySampler, DynamicSampling, RolloutCallback
from lit_rlhf.errors import ConfigurationError


@pytest.fixture
def sums():
    """Twelve prompts ending in 0=, 1= and 2=: always, never and (nearly always) partly solved."""
    return [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(3)]


def solved(prompts, completions):
    known = {"0=": 1.0, "1=": 0.0}
    return [known.get(p[-2:], float(len(text) % 2)) for p, text in zip(prompts, completions, strict=True)]


def constant(completions):
    return [0.5] * len(completions)


@pytest.fixture
def make_sums(make_data, sums):
    def make(**options):
        defaults = {"prompts_per_iteration": 4, "group_size": 6, "rewards": [solved, constant], "max_new_tokens": 4}
        return make_data(sums, **{**defaults, **options})

    return make


class Drawn(RolloutCallback):
    runs_first = True

    def __init__(self):
        self.prompts = []

    def on_rewards_end(self, trainer, module, rollout):
        self.prompts.append(list(dict.fromkeys(rollout.prompts)))


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "prompt_difficulty.jsonl").read_text().splitlines()]


def test_counts_of_the_run(fit, make_sums, watch, tmp_path):
    fit(make_sums(), [DifficultySampler(1.0, 1.0)], max_epochs=6)
    found = lines(tmp_path)
    assert [line["index"] for line in found] == list(range(12))
    for line in found:
        assert line["draws"] == 2
        texts = [
            text
            for rollout in watch.rollouts
            for prompt, text in zip(rollout.prompts, rollout.completions, strict=True)
            if prompt == line["prompt"]
        ]
        assert line["completions"] == len(texts) == 12
        assert line["solved"] == sum(solved([line["prompt"]] * 12, texts))
        assert line["solve_rate"] == line["solved"] / 12
        assert line["last_solve_rate"] == sum(solved([line["prompt"]] * 6, texts[6:])) / 6
    for name, rate in (("always", 1), ("never", 0)):
        share = sum(line["last_solve_rate"] == rate for line in found) / 12
        assert watch.final[f"group/{name}_solved"] == pytest.approx(share)
    assert watch.final["group/never_solved"] >= 1 / 3


def test_with_equal_weights_every_prompt_has_its_turn(fit, make_sums, sums):
    drawn = Drawn()
    fit(make_sums(prompts_per_iteration=5), [DifficultySampler(1.0, 1.0), drawn], max_epochs=12)
    assert all(len(prompts) == 5 for prompts in drawn.prompts)
    flat = [prompt for prompts in drawn.prompts for prompt in prompts]
    assert len(flat) == 60
    for start in range(0, 60, 12):
        assert sorted(flat[start : start + 12]) == sorted(row["prompt"] for row in sums)


@pytest.mark.parametrize(("always", "never"), [(0.25, 1.0), (1.0, 0.5), (0.25, 0.25)])
def test_prompts_that_teach_nothing_are_drawn_less_often(fit, make_sums, tmp_path, always, never):
    """Rewards that do not depend on the policy, so a prompt's weight is what its kind says (1 if it is mixed)."""

    def half(prompts, completions):
        known = {"0=": 1.0, "1=": 0.0}
        return [known.get(p[-2:], float(i % 2)) for i, p in enumerate(prompts)]

    fit(make_sums(rewards=half), [DifficultySampler(always, never)], max_epochs=24, module={"kl_coef": 0.0})
    found = lines(tmp_path)
    draws = {kind: [line["draws"] for line in found if line["prompt"].endswith(kind)] for kind in ("0=", "1=", "2=")}
    assert sum(map(sum, draws.values())) == 96
    full = sum(draws["2="]) / 4
    for kind, weight in (("0=", always), ("1=", never)):
        assert all(abs(count - weight * full) <= 1.5 for count in draws[kind]), (kind, draws)
    assert max(draws["2="]) - min(draws["2="]) <= 1


def test_a_prompt_that_starts_being_solved_is_back_at_full_weight(fit, make_sums):
    """Never solved in the first two draws, then mixed."""
    seen = {}

    def learns(prompts, completions):
        scores = []
        for number, prompt in enumerate(prompts):
            seen[prompt] = seen.get(prompt, 0) + 1
            scores.append(float(seen[prompt] > 12 and number % 2))
        return scores

    sampler = DifficultySampler(0.1, 0.5)
    fit(make_sums(rewards=learns, prompts_per_iteration=12), [sampler], max_epochs=2)
    assert set(sampler.weights().tolist()) == {0.5}
    fit(make_sums(rewards=learns, prompts_per_iteration=12), [sampler], max_epochs=1)
    assert set(sampler.weights().tolist()) == {1.0}


def test_resume(resumed_equals_uninterrupted, make_sums):
    drawn = []

    def callbacks():
        drawn.append(Drawn())
        return [drawn[-1], DifficultySampler(0.1, 0.3), DynamicSampling(token_budget=60)]

    logged, _ = resumed_equals_uninterrupted(callbacks, make_sums)
    assert logged[-1]["group/never_solved"] > 0
    whole, again = drawn
    assert again.prompts == whole.prompts[-len(again.prompts) :]
    assert len(again.prompts) < len(whole.prompts)


def test_what_dynamic_sampling_throws_away_is_counted(fit, make_sums, watch, tmp_path):
    """And what is drawn again is next in the queue, and counts as drawn."""
    drawn = Drawn()
    fit(make_sums(), [DynamicSampling(token_budget=200), DifficultySampler(), drawn], max_epochs=1)
    flat = [prompt for prompts in drawn.prompts for prompt in prompts]
    assert len(drawn.prompts) > 1
    assert len(flat) == len(set(flat)) > 4
    assert {line["prompt"] for line in lines(tmp_path) if line["draws"]} == set(flat)
    assert watch.final["group/never_solved"] > 0


def test_another_reward_and_its_threshold(fit, make_sums):
    sampler = DifficultySampler(0.2, 0.3, reward="constant")
    fit(make_sums(prompts_per_iteration=12), [sampler], max_epochs=1)
    assert set(sampler.weights().tolist()) == {0.3}
    fit(make_sums(prompts_per_iteration=12, verifier_threshold=0.5), [sampler], max_epochs=1)
    assert set(sampler.weights().tolist()) == {0.2}


def test_completions_that_nobody_judged(fit, make_sums, watch, tmp_path):
    def abstains(completions):
        return [None] * len(completions)

    sampler = DifficultySampler()
    fit(make_sums(rewards=[abstains, constant]), [sampler], max_epochs=3)
    assert set(sampler.weights().tolist()) == {1.0}
    assert {(line["draws"], line["completions"], line["solve_rate"]) for line in lines(tmp_path)} == {(1, 0, None)}
    assert "group/never_solved" not in watch.final


def test_the_file_is_written_when_a_run_fails(fit, make_sums, tmp_path):
    calls = []

    def fails(completions):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return [1.0] * len(completions)

    with pytest.raises(Exception, match="no more"):
        fit(make_sums(rewards=fails), [DifficultySampler(path=str(tmp_path / "a" / "here.jsonl"))], max_epochs=5)
    found = [json.loads(line) for line in (tmp_path / "a" / "here.jsonl").read_text().splitlines()]
    assert sum(line["draws"] for line in found) == 8


@pytest.mark.distributed
def test_two_ranks_draw_what_one_does(tmp_path, make_trainer, make_sums, policy_dir):
    class Save(Drawn):
        def on_train_end(self, trainer, pl_module):
            (sampler,) = [c for c in trainer.callbacks if isinstance(c, DifficultySampler)]
            torch.save((self.prompts, sampler.state_dict()), tmp_path / f"{trainer.world_size}-{trainer.global_rank}")

    for devices in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        callbacks = [DifficultySampler(0.3, 0.2), DynamicSampling(token_budget=100), Save()]
        trainer = make_trainer(callbacks=callbacks, max_epochs=5, **devices)
        trainer.fit(GRPOModule(policy_dir, lr=1e-4), make_sums(prompts_per_iteration=5))
    (prompts, state), (mine, one), (others, two) = (torch.load(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    assert repr(state) == repr(one) == repr(two)
    assert sorted(chain(*prompts)) == sorted(chain(*mine, *others))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"always_solved_weight": 0}, r"always_solved_weight must be a number in \(0, 1\], got 0"),
        ({"never_solved_weight": 1.1}, r"never_solved_weight must be a number in \(0, 1\], got 1.1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DifficultySampler(**options)


def test_an_unknown_reward_is_refused(fit, make_sums):
    with pytest.raises(ConfigurationError, match="no reward function 'other', the names are solved, constant"):
        fit(make_sums(), [DifficultySampler(reward="other")])
