"""Every preset and option gives the loss and the gradient of its equation, however the step is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lit_rlhf import GRPOModule, PPOModule, RolloutBatch
from lit_rlhf.callbacks import StdThresholdMask
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import kl_k1
from lit_rlhf.metrics.iteration import IterationMetrics
from lit_rlhf.models.completions import CompletionOutputs
from lit_rlhf.modules.objective import WEIGHT_MEANS
from lit_rlhf.modules.policy_loss import POLICY_MEANS
from lit_rlhf.modules.presets import DEFAULTS, PRESETS
from lit_rlhf.rollout.batch import MicroBatch
from tests.modules import equations
from tests.modules.equations import Case

WIDTH = 9

# What the equation of each is, and how far old and new policy are apart: enough for the clip to act.
PRESET_CASES = [(name, {"numerics": name}, 1e-3 if name == "gspo" else 0.8) for name in PRESETS]
OPTION_CASES = [
    ("batch_scale", {"advantage_scale": "batch", "kl_coef": 0.0}, 0.8),
    ("masked_truncated", {"mask_truncated": True, "kl_coef": 0.0}, 0.8),
    ("top_entropy", {"top_entropy_share": 0.2, "kl_coef": 0.0}, 0.8),
    (
        "masked_sequences",
        {
            "sampling_correction": "sequence_mask",
            "sampling_weight_min": 1 / 3,
            "sampling_weight_max": 3.0,
            "kl_coef": 0.0,
        },
        0.8,
    ),
    ("median_k2", {"baseline": "median", "kl_placement": "loss", "kl_estimator": "k2", "kl_coef": 0.1}, 0.8),
]


def random_case(seed: int, apart: float) -> Case:
    """Five groups of four: ragged, with holes, one group dead, a row cut off, one abstaining, one without a token."""
    random = torch.Generator().manual_seed(seed)
    n = 20
    lengths = torch.randint(2, WIDTH + 1, (n,), generator=random)
    lengths[5], lengths[6] = WIDTH, 4
    mask = torch.arange(WIDTH) < lengths[:, None]
    mask &= torch.rand(n, WIDTH, generator=random) < 0.85
    mask[6], mask[:6, 0] = False, True
    rewards = torch.randint(-4, 9, (n,), generator=random).double() / 4
    rewards[8:12] = 0.7
    rewards[0], rewards[5], rewards[13] = 3.0, -2.0, 2.5

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, WIDTH, generator=random, dtype=torch.float64)

    log_probs = -noise(1.0).abs() - 0.2
    old = log_probs + noise(apart)
    finished = torch.ones(n, dtype=torch.bool)
    finished[5] = False
    scored = torch.ones(n, dtype=torch.bool)
    scored[15] = False
    return Case(
        log_probs=log_probs.requires_grad_(),
        old=old,
        ref=old + noise(0.3),
        engine=old + noise(0.5),
        entropies=noise(1.0).abs().float(),
        mask=mask,
        rewards=rewards.float().double(),
        group=torch.arange(5).repeat_interleave(4),
        scored=scored,
        finished=finished,
        max_new_tokens=WIDTH,
    )


def rollout_of(case: Case) -> RolloutBatch:
    n = len(case.rewards)
    return RolloutBatch(
        prompt_ids=torch.ones(n, 1, dtype=torch.long),
        prompt_lengths=torch.ones(n, dtype=torch.long),
        completion_ids=torch.ones(n, WIDTH, dtype=torch.long),
        completion_lengths=torch.full((n,), WIDTH),
        completion_mask=case.mask,
        finished=case.finished,
        group_index=case.group,
        prompt_index=case.group,
        sampling_log_probs=case.engine,
        rewards=case.rewards.float(),
        scored_mask=case.scored,
        reward_components=case.rewards[:, None].float(),
        prompts=("p",) * n,
        completions=("c",) * n,
        values=case.entropies,  # carried along with their rows
    )


class FromCase(GRPOModule):
    """Takes the log-probs and entropies of the case where a model would be run."""

    case: Case

    def _old_log_probs(self, rollout: RolloutBatch, parts: list[list[int]]) -> torch.Tensor:
        return self.case.old

    def _reference_log_probs(self, rollout: RolloutBatch, parts: list[list[int]]) -> torch.Tensor:
        return self.case.ref

    def _entropies(self, rows: RolloutBatch) -> torch.Tensor:
        return rows.values

    def _of_all_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values


def made(policy: str, case: Case, options: dict[str, Any]) -> tuple[FromCase, RolloutBatch]:
    """A module, and the rollout after the last hook."""
    module = FromCase(policy, **options)
    module.case = case
    module.iteration_metrics = IterationMetrics([*POLICY_MEANS, *WEIGHT_MEANS], [])
    rollout = module.score_rollout(rollout_of(case), [list(range(20))], ratio_is_one=False)
    rollout = module.compute_advantages(rollout)
    return module, StdThresholdMask().on_advantages_end(None, module, rollout) or rollout


def loss_and_gradient(
    module: FromCase, rollout: RolloutBatch, case: Case, parts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one optimizer step cut into parts, of which only the rows with something to teach are run."""
    denominator = module.loss_denominator(rollout, case.max_new_tokens)
    live = module.live_rows(rollout)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        rows = [row for row in part if live[row]]
        outputs = CompletionOutputs(case.log_probs[rows], case.entropies[rows])
        total = total + module.loss(outputs, MicroBatch(rollout.select(rows), denominator))
    return total.detach(), torch.autograd.grad(total, case.log_probs)[0]


@pytest.mark.parametrize(("name", "options", "apart"), PRESET_CASES + OPTION_CASES, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_those_of_the_equation(policy_dir, name, options, apart, seed):
    case = random_case(seed, apart)
    expected = getattr(equations, name)(case)
    (expected_gradient,) = torch.autograd.grad(expected, case.log_probs)
    module, rollout = made(policy_dir, case, options)
    for parts in ([list(range(20))], [list(range(start, 20, 3)) for start in range(3)], [[row] for row in range(20)]):
        loss, gradient = loss_and_gradient(module, rollout, case, parts)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
        assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()
    assert module.iteration_metrics.compute()["policy/clip_fraction"] > 0.01  # the clip had something to do


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_before_the_first_step_the_gradient_is_reinforce(policy_dir, name):
    """Both papers derive their step without a ratio or a clip."""
    case = random_case(3, 0.0)
    module, rollout = made(policy_dir, case, {"numerics": name})
    _, gradient = loss_and_gradient(module, rollout, case, [list(range(20))])
    places = equations.every_token(case)
    if name == "rloo":
        rows = {i for i, _ in places}
        terms = [equations.rloo_advantage(case, i) * case.log_probs[i, t] / len(rows) for i, t in places]
    else:
        advantages = equations.reinforce_pp_advantages(case)
        terms = [advantages[place] * case.log_probs[place] / len(places) for place in places]
    (expected,) = torch.autograd.grad(-sum(terms), case.log_probs)
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()


def test_rows_of_weight_zero_are_not_run(policy_dir):
    case = random_case(0, 0.0)
    module, rollout = made(
        policy_dir, case, {"sampling_correction": "sequence_mask", "sampling_weight_max": 1.5, "kl_coef": 0.0}
    )
    live = module.live_rows(rollout)
    gap = (case.old - case.engine).masked_fill(~case.mask, 0.0).sum(1).exp()
    dead = torch.isin(torch.arange(20), torch.tensor([6, 8, 9, 10, 11, 15]))
    assert torch.equal(live, (gap <= 1.5) & ~dead & (rollout.advantages != 0).any(1))
    assert 0 < live.sum() < 14
    entropic = FromCase(policy_dir, sampling_correction="sequence_mask", entropy_coef=0.01, kl_coef=0.0)
    assert entropic.live_rows(rollout).sum() == 18  # all with a token that somebody scored


def test_truncated_rows_leave_the_mask_but_not_the_baseline(policy_dir):
    case = random_case(0, 0.8)
    _, plain = made(policy_dir, case, {"kl_coef": 0.0})
    module, masked = made(policy_dir, case, {"kl_coef": 0.0, "mask_truncated": True})
    assert torch.equal(plain.advantages, masked.advantages)
    assert not module.loss_mask(masked)[5].any()
    assert not module.live_rows(masked)[5]


def test_kl_after_normalising_stays_on_dead_groups(policy_dir):
    case = random_case(0, 0.8)
    _, rollout = made(policy_dir, case, {"kl_placement": "after", "kl_coef": 0.1})
    kl = kl_k1(case.old, case.ref).masked_fill(~case.mask, 0.0).sum(1)
    for row in (8, 11):
        expected = torch.where(case.mask[row], -0.1 * kl[row], 0.0).float()
        torch.testing.assert_close(rollout.advantages[row].float(), expected)
    assert not rollout.advantages[15].any()  # nobody scored it


def test_a_given_option_wins_over_the_preset(policy_dir):
    module = GRPOModule(policy_dir, numerics="dapo", clip_range_high=0.5, std_ddof=1)
    assert (module.policy_loss.clip_low, module.policy_loss.clip_high, module.std_ddof) == (0.2, 0.5, 1)
    assert (module.kl_coef, module.std_eps) == (0.0, 0.0)
    off = GRPOModule(policy_dir, numerics="verl", dual_clip=0.0, surrogate="clipped_weight")
    assert off.policy_loss.dual_clip == 0.0
    elsewhere = GRPOModule(policy_dir, numerics="grpo", kl_placement="reward")
    assert (elsewhere.kl_placement, elsewhere.kl_coef) == ("reward", 0.04)


@pytest.mark.parametrize("name", PRESETS)
def test_hyperparameters_show_what_is_in_force_and_make_the_same_module(policy_dir, name):
    module = GRPOModule(policy_dir, numerics=name)
    assert {option: module.hparams[option] for option in PRESETS[name].options} == dict(PRESETS[name].options)
    again = GRPOModule(**module.hparams)
    assert again.numerics_summary() == module.numerics_summary()
    assert again.hparams == module.hparams
    assert f"preset {name} (" in module.numerics_summary()
    without = GRPOModule(**{**module.hparams, "numerics": None})
    assert without.policy_loss == module.policy_loss


def test_presets_set_known_options_to_something_else_than_their_default():
    for name, preset in PRESETS.items():
        assert set(preset.options) <= set(DEFAULTS), name
        changed = {option for option, value in preset.options.items() if value != DEFAULTS[option]}
        assert set(preset.options) - changed <= {"clip_range"}, name
        assert preset.source


def test_defaults_are_those_of_a_module_without_options(policy_dir):
    in_force = {**DEFAULTS, "kl_estimator": None, "kl_gradient": None}  # of a loss without a KL term
    grpo, ppo = GRPOModule(policy_dir), PPOModule(policy_dir)
    assert {option: grpo.hparams[option] for option in DEFAULTS} == in_force
    assert {option: ppo.hparams[option] for option in ppo.chosen_options} == {
        option: in_force[option] for option in ppo.chosen_options
    }
    assert ppo.policy_loss == grpo.policy_loss


@pytest.mark.parametrize("algorithm", [GRPOModule, PPOModule])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_estimator": "k2"}, "kl_placement is 'reward'"),
        ({"kl_gradient": "plain"}, "kl_placement is 'reward'"),
        ({"kl_placement": "loss", "kl_estimator": "k1", "kl_gradient": "plain"}, "does not contain the reference"),
        ({"surrogate": "clipped_weight", "dual_clip": 3.0}, "bounds every weight already"),
        ({"dual_clip": 1.1}, "must exceed 1.2, got 1.1"),
        ({"dual_clip": 1.4, "clip_range_high": 0.5}, "must exceed 1.5, got 1.4"),
        ({"sampling_weight_max": 3.0}, "sampling_correction, which is off"),
        ({"sampling_correction": "token_mask", "sampling_weight_max": 0.5}, "sampling_weight_max must be a number"),
        ({"top_entropy_share": 0.0}, r"top_entropy_share must be a number in \(0, 1\]"),
        ({"ratio": "word"}, "ratio must be one of token, sequence, got 'word'"),
        ({"surrogate": "none"}, "surrogate must be one of clip, clipped_weight"),
        ({"kl_placement": "loss", "kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3, got 'k4'"),
        ({"sampling_correction": "on"}, "sampling_correction must be one of off, token_truncate"),
        ({"clip_range_high": -0.1}, "clip_range_high must be a number"),
    ],
)
def test_options_that_contradict_each_other(policy_dir, algorithm, options, message):
    with pytest.raises(ConfigurationError, match=message):
        algorithm(policy_dir, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "ppo"}, "numerics must be one of grpo, dr_grpo, .*, got 'ppo'"),
        (
            {"advantage_scale": "batch", "scale_by_std": False},
            "advantage_scale: batch and scale_by_std: False contradict",
        ),
        ({"whiten_advantages": True}, "set advantage_scale: none, got 'group'"),
        ({"whiten_advantages": True, "scale_by_std": False, "kl_placement": "after"}, "normalise the penalty as well"),
        ({"numerics": "verl", "surrogate": "clipped_weight"}, "set it to 0, got 3"),
        ({"advantage_scale": "row"}, "advantage_scale must be one of group, batch, none"),
        ({"std_eps": math.nan}, "std_eps must be a number"),
    ],
)
def test_options_of_grpo_that_contradict_each_other(policy_dir, options, message):
    with pytest.raises(ConfigurationError, match=message):
        GRPOModule(policy_dir, **options)


def test_ppo_has_no_normalised_advantages_to_subtract_from(policy_dir):
    with pytest.raises(ConfigurationError, match="kl_placement of PPOModule must be one of reward, loss, got 'after'"):
        PPOModule(policy_dir, kl_placement="after")


@pytest.mark.parametrize(("written", "meant"), [(True, "group"), (False, "none")])
def test_the_other_way_to_write_the_scale(policy_dir, written, meant):
    assert GRPOModule(policy_dir, scale_by_std=written).advantage_scale == meant
    assert GRPOModule(policy_dir, scale_by_std=written, numerics="dr_grpo").advantage_scale == meant


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_with_each_preset(fit, make_data, watch, name):
    """Two optimizer steps on each rollout, cut into micro-batches; all that is logged is finite."""
    module = fit(
        make_data(steps_per_pass=2, micro_batch_size=5),
        module={"numerics": name, "kl_coef": 0.05},
        max_epochs=2,
    )
    assert all(math.isfinite(value) for value in watch.final.values())
    assert watch.final["policy/grad_norm"] > 0
    assert watch.final["policy/dead_steps"] < 1
    assert ("sampling/weight" in watch.final) == (name == "open_instruct")
    assert module.numerics == name


def test_the_threshold_of_the_top_entropies(fit, watch):
    """A fifth of the tokens learns: the others weigh nothing, and the denominator is that of all."""
    fit(module={"top_entropy_share": 0.2, "kl_coef": 0.0}, max_epochs=1)
    (rollout,) = watch.rollouts
    kept = rollout.loss_weights[rollout.completion_mask]
    assert 0.2 <= kept.mean().item() < 0.3
    assert watch.denominators[0] == rollout.completion_mask.sum().item()
    assert 0 < watch.final["policy/entropy_threshold"] < math.log(30)
    assert watch.final["policy/entropy_threshold"] > watch.final["policy/entropy"] / 2


def test_an_engine_that_is_the_policy_needs_no_correction(fit, watch):
    """Also with one step per rollout, where the ratio would need no old log-probs."""
    fit(module={"sampling_correction": "sequence_truncate", "kl_coef": 0.0}, max_epochs=2)
    assert watch.final["sampling/weight"] == pytest.approx(1.0, abs=1e-4)
    assert watch.final["sampling/weight_outside"] == 0.0


def test_presets_from_the_command_line(policy_dir):
    """jsonargparse passes every option; only those that were written win over the preset."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_subclass_arguments(GRPOModule, "model")
    words = ["--model=GRPOModule", f"--model.policy={policy_dir}", "--model.numerics=gspo", "--model.clip_range=0.1"]
    module = parser.instantiate(parser.parse_args(words)).model
    assert (module.policy_loss.clip_low, module.policy_loss.clip_high) == (0.1, 4e-4)
    assert (module.policy_loss.ratio, module.kl_coef, module.loss_aggregation) == ("sequence", 0.0, "sequence_mean")
