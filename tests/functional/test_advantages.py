"""Group advantages against plain-Python statistics and against exact policy gradients of enumerable policies."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.functional import dead_groups, group_advantages, group_std, kl_k1
from lit_rlhf.functional.advantages import BASELINES, SCALES

property_test = settings(max_examples=60, deadline=None, derandomize=True)
quarters = st.integers(-12, 12).map(lambda n: n / 4)  # sums and differences of these are exact


@st.composite
def grouped_rewards(draw):
    """Rows of several groups in any order: reward (None abstains) and group index, both lists."""
    rows = []
    for index in draw(st.lists(st.integers(-3, 40), min_size=1, max_size=4, unique=True)):
        rewards = draw(st.lists(st.one_of(quarters, quarters, st.none()), min_size=1, max_size=6))
        rows += [(reward, index) for reward in rewards]
    rows = draw(st.permutations(rows))
    return [reward for reward, _ in rows], [index for _, index in rows]


def as_tensors(rewards, groups, abstained=float("nan")):
    scored = torch.tensor([reward is not None for reward in rewards])
    values = torch.tensor([abstained if reward is None else reward for reward in rewards])
    return values, torch.tensor(groups), scored


def plain_deviation(values, ddof):
    if len(values) < 2:
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def plain_advantages(rewards, groups, baseline, scale, eps, ddof):
    """The same numbers with the standard library, one row at a time."""
    everything = [reward for reward in rewards if reward is not None]
    result = []
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for i, r in enumerate(rewards) if groups[i] == group and r is not None and i != row]
        needs_group = baseline != "none" or scale == "group"
        if reward is None or (needs_group and not others):
            result.append(0.0)
            continue
        members = [*others, reward]
        if baseline == "mean":
            reward -= statistics.fmean(members)
        elif baseline == "median":
            reward -= statistics.median(members)
        elif baseline == "leave_one_out":
            reward -= statistics.fmean(others)
        if scale == "group":
            reward /= plain_deviation(members, ddof) + eps
        elif scale == "batch":
            reward /= plain_deviation(everything, ddof) + eps
        result.append(reward)
    return result


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=grouped_rewards(), ddof=st.sampled_from([0, 1]), eps=st.sampled_from([1e-4, 1e-2]))
def test_equals_plain_statistics(baseline, scale, case, ddof, eps):
    values, groups, scored = as_tensors(*case)
    result = group_advantages(values, groups, scored, baseline=baseline, scale=scale, eps=eps, ddof=ddof)
    assert result.dtype == torch.float32
    expected = plain_advantages(*case, baseline, scale, eps, ddof)
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_worked_example_of_the_group_advantage():
    rewards, group = torch.tensor([2.0, 4.0, 6.0, 8.0]), torch.zeros(4, dtype=torch.long)
    unscaled = group_advantages(rewards, group, scale="none")
    assert (rewards - unscaled).tolist() == [5.0] * 4  # the mean
    assert [f"{std:.3f}" for std in group_std(rewards, group).tolist()] == ["2.236"] * 4
    advantages = group_advantages(rewards, group)
    assert [f"{advantage:.2f}" for advantage in advantages.tolist()] == ["-1.34", "-0.45", "0.45", "1.34"]


def test_worked_example_with_a_critic():
    """A critic that is off by a constant shifts r - V; the group baseline cannot be off like that."""
    rewards, group = torch.tensor([2.0, 4.0, 6.0, 8.0]), torch.zeros(4, dtype=torch.long)
    options = {"baseline": "none", "scale": "none"}
    assert group_advantages(rewards - 5.0, group, **options).tolist() == [-3.0, -1.0, 1.0, 3.0]
    assert group_advantages(rewards - 3.0, group, **options).tolist() == [-1.0, 1.0, 3.0, 5.0]
    assert group_advantages(rewards - 3.0, group, scale="none").tolist() == [-3.0, -1.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("rewards", "options", "expected"),
    [
        ([1, 0, 1, 1], {"ddof": 1}, [0.4999, -1.4997, 0.4999, 0.4999]),
        ([1, 0, 1, 1], {"ddof": 0}, [0.5772, -1.7317, 0.5772, 0.5772]),
        ([1, 0, 1, 1], {"scale": "none"}, [0.25, -0.75, 0.25, 0.25]),
        ([1, 0], {"ddof": 1}, [0.7070, -0.7070]),
        ([1, 0], {}, [0.9998, -0.9998]),
        ([0, 1, 5], {"baseline": "median", "scale": "none"}, [-1, 0, 4]),
        ([0, 1, 2, 7], {"baseline": "median", "scale": "none"}, [-1.5, -0.5, 0.5, 5.5]),
        ([0, 1, 2, 7], {"baseline": "leave_one_out", "scale": "none"}, [-10 / 3, -2, -2 / 3, 6]),
    ],
)
def test_values_of_one_group(rewards, options, expected):
    group = torch.zeros(len(rewards), dtype=torch.long)
    result = group_advantages(torch.tensor(rewards, dtype=torch.float32), group, **options)
    assert result.tolist() == pytest.approx(expected, abs=6e-5)


def test_median_keeps_the_deviation_about_the_mean():
    rewards, group = torch.tensor([0.0, 1.0, 2.0, 7.0]), torch.zeros(4, dtype=torch.long)
    median = group_advantages(rewards, group, baseline="median", eps=0.0)
    mean = group_advantages(rewards, group, baseline="mean", eps=0.0)
    assert (median - mean).tolist() == pytest.approx([1.0 / statistics.pstdev([0, 1, 2, 7])] * 4, rel=1e-6)


@pytest.mark.parametrize("baseline", ["mean", "median", "leave_one_out"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_one_scored_row_has_no_advantage(baseline, ddof):
    values, groups, scored = as_tensors([1.0, None, None, None, 3.0], [0, 0, 0, 0, 1])
    for scale in SCALES:
        result = group_advantages(values, groups, scored, baseline=baseline, scale=scale, ddof=ddof)
        assert result.tolist() == [0.0] * 5
    assert dead_groups(values, groups, scored).all()


@pytest.mark.parametrize("baseline", ["mean", "median", "leave_one_out"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("reward", [0.7, 0.1, 1e6 + 0.1, -3.3])
@pytest.mark.parametrize(("size", "dtype"), [(8, torch.float32), (3, torch.float64), (7, torch.float64)])
def test_equal_rewards_have_exactly_no_advantage(baseline, scale, ddof, reward, size, dtype):
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([5] * size + [9, 9])
    result = group_advantages(rewards, groups, baseline=baseline, scale=scale, ddof=ddof, eps=1e-12)
    assert result[:size].tolist() == [0.0] * size
    assert group_std(rewards, groups)[:size].tolist() == [0.0] * size
    assert dead_groups(rewards, groups).tolist() == [True] * size + [False] * 2
    assert (result[size:] != 0).all()


@property_test
@given(grouped_rewards(), st.randoms(use_true_random=False), st.sampled_from(BASELINES), st.sampled_from(SCALES))
def test_rows_may_be_shuffled(case, random, baseline, scale):
    values, groups, scored = as_tensors(*case)
    order = list(range(len(values)))
    random.shuffle(order)
    here = group_advantages(values, groups, scored, baseline=baseline, scale=scale)
    there = group_advantages(values[order], groups[order], scored[order], baseline=baseline, scale=scale)
    torch.testing.assert_close(there, here[order], rtol=1e-6, atol=1e-6)


@property_test
@given(st.lists(st.integers(0, 6), min_size=1, max_size=24))
def test_rewards_that_only_name_the_prompt_give_nothing(prompts):
    """Had a row lost its group on the way, it would differ from its neighbours."""
    groups = torch.tensor(prompts)
    assert group_advantages(groups / 10, groups).tolist() == [0.0] * len(prompts)


@property_test
@given(grouped_rewards(), st.integers(-40, 40), st.sampled_from(["mean", "median", "leave_one_out"]))
def test_a_constant_changes_nothing(case, constant, baseline):
    values, groups, scored = as_tensors(*case)
    for scale in ("group", "none"):
        options = {"baseline": baseline, "scale": scale}
        assert torch.equal(
            group_advantages(values + constant, groups, scored, **options),
            group_advantages(values, groups, scored, **options),
        )


@property_test
@given(
    grouped_rewards(),
    st.sampled_from([float("nan"), float("inf"), 1e9]),
    st.sampled_from(BASELINES),
    st.sampled_from(SCALES),
)
def test_abstaining_rows_enter_nothing(case, garbage, baseline, scale):
    options = {"baseline": baseline, "scale": scale}
    values, groups, scored = as_tensors(*case, abstained=garbage)
    result = group_advantages(values, groups, scored, **options)
    assert result[~scored].tolist() == [0.0] * int((~scored).sum())
    kept = group_advantages(values[scored], groups[scored], **options)
    torch.testing.assert_close(result[scored], kept, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(group_std(values, groups, scored)[scored], group_std(values[scored], groups[scored]))


@property_test
@given(st.integers(-5, 5), st.integers(2, 6))
def test_batch_scale_of_a_single_group_is_the_group_scale(first, size):
    rewards, group = torch.arange(first, first + size).float(), torch.zeros(size, dtype=torch.long)
    torch.testing.assert_close(
        group_advantages(rewards, group, scale="batch"), group_advantages(rewards, group, scale="group")
    )


def test_batch_scale_has_one_divisor_for_all_groups():
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 10.0]), torch.tensor([0, 0, 1, 1])
    spread = statistics.pstdev([0, 1, 0, 10])
    result = group_advantages(rewards, groups, scale="batch", eps=0.0)
    assert result.tolist() == pytest.approx([-0.5 / spread, 0.5 / spread, -5 / spread, 5 / spread], rel=1e-6)


def test_batch_scale_takes_the_deviation_of_all_ranks():
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 10.0]), torch.tensor([0, 0, 1, 1])
    together = group_advantages(rewards, groups, scale="batch")
    spread = rewards.double().std(correction=0)
    halves = [
        group_advantages(rewards[rows], groups[rows], scale="batch", batch_std=spread)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert torch.equal(torch.cat(halves), together)


@pytest.mark.parametrize("scale", SCALES)
def test_without_eps_equal_rewards_have_no_advantage(scale):
    rewards, groups = torch.full((4,), 0.7), torch.zeros(4, dtype=torch.long)
    assert group_advantages(rewards, groups, scale=scale, eps=0.0).tolist() == [0.0] * 4


def test_group_cut_between_two_ranks():
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1])
    groups = torch.arange(3).repeat_interleave(4)
    gathered = group_advantages(rewards, groups, ddof=1)[4:8]
    assert gathered.tolist() == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=5e-4)
    halves = [group_advantages(rewards[rows], groups[rows], ddof=1) for rows in (slice(0, 6), slice(6, 12))]
    assert torch.cat(halves)[4:8].tolist() == [0.0] * 4  # each half alone sees equal rewards


def test_kl_noise_does_not_revive_a_dead_group():
    raw, groups = torch.full((8,), 0.7), torch.zeros(8, dtype=torch.long)
    penalised = raw - 0.04 * torch.randn(8, generator=torch.Generator().manual_seed(3))
    assert group_advantages(penalised, groups).abs().max() > 1.0  # noise, scaled up to full size
    assert dead_groups(raw, groups).all()
    assert not dead_groups(penalised, groups).any()  # which is why the raw reward is asked


def test_threshold_is_inclusive():
    rewards, groups = torch.tensor([0.0, 0.5]), torch.zeros(2, dtype=torch.long)
    assert dead_groups(rewards, groups, threshold=0.25).all()
    assert not dead_groups(rewards, groups, threshold=0.2499).any()


def test_no_rows():
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    for baseline in BASELINES:
        for scale in SCALES:
            assert group_advantages(*nothing, baseline=baseline, scale=scale).shape == (0,)
    assert dead_groups(*nothing).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"baseline": "max"}, "baseline must be one of mean, median, leave_one_out, none"),
        ({"scale": "rank"}, "scale must be one of group, batch, none"),
        ({"group_index": torch.zeros(3, dtype=torch.long)}, "group_index must have the shape"),
        ({"scored_mask": torch.ones(3, dtype=torch.bool)}, "scored_mask must have the shape"),
        ({"rewards": torch.zeros(2, 1), "group_index": torch.zeros(2, 1, dtype=torch.long)}, r"rewards must be \(N,\)"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(**{"rewards": torch.zeros(2), "group_index": torch.zeros(2, dtype=torch.long)} | arguments)


# --- expected gradients, summed over every group that the policy could sample ---


def expected_gradient(logits, rewards, group_size, **options):
    """Expected gradient of ``mean_i A_i log pi(y_i)`` over groups of independent one-token completions."""
    tokens = torch.cartesian_prod(*[torch.arange(len(logits))] * group_size)  # (V ** G, G)
    log_probs = logits.log_softmax(-1)
    weight = log_probs.detach()[tokens].sum(-1, keepdim=True).exp()
    group = torch.arange(len(tokens))[:, None].expand_as(tokens)
    advantages = group_advantages(rewards[tokens].flatten(), group.flatten(), **options).view_as(tokens)
    return torch.autograd.grad((weight * advantages * log_probs[tokens]).sum() / group_size, logits)[0]


def exact_gradient(logits, rewards):
    return torch.autograd.grad((logits.softmax(-1) * rewards).sum(), logits)[0]


three = st.lists(st.floats(-2, 2), min_size=3, max_size=3)


@pytest.mark.parametrize("group_size", [2, 3])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(policy=three, rewards=three)
def test_bias_of_each_baseline(group_size, policy, rewards):
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    reward = torch.tensor(rewards, dtype=torch.float64)
    exact = exact_gradient(logits, reward)
    factors = {"mean": (group_size - 1) / group_size, "leave_one_out": 1.0, "none": 1.0}
    for baseline, factor in factors.items():
        result = expected_gradient(logits, reward, group_size, baseline=baseline, scale="none")
        torch.testing.assert_close(result, factor * exact, rtol=0, atol=1e-6)


def test_dividing_by_the_group_deviation_weighs_prompts_by_difficulty():
    """One factor per prompt: that of a hard prompt is larger, so the sum over prompts is no longer the gradient."""
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def factor(log_odds, scale):
        logits = torch.tensor([log_odds, 0.0], dtype=torch.float64, requires_grad=True)
        result = expected_gradient(logits, reward, 8, baseline="leave_one_out", scale=scale)
        return (result[0] / exact_gradient(logits, reward)[0]).item()

    assert factor(0.0, "none") == pytest.approx(factor(-3.0, "none"), rel=1e-5)
    assert factor(-3.0, "group") > 1.1 * factor(0.0, "group")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(three, three, three, st.floats(0.01, 0.5))
def test_only_a_baseline_on_the_penalised_reward_keeps_the_kl(policy, reference, rewards, coef):
    """An advantage that never sees the KL switches the constraint off."""
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(reference, dtype=torch.float64).log_softmax(-1)
    raw = torch.tensor(rewards, dtype=torch.float64)
    log_probs = logits.log_softmax(-1)
    penalised = raw - coef * kl_k1(log_probs.detach(), ref)
    (kl_gradient,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits)

    options = {"group_size": 2, "baseline": "leave_one_out", "scale": "none"}
    without = expected_gradient(logits, raw, **options)
    with_kl = expected_gradient(logits, penalised, **options)
    task = exact_gradient(logits, raw)
    torch.testing.assert_close(without, task, rtol=0, atol=1e-6)
    torch.testing.assert_close(with_kl, task - coef * kl_gradient, rtol=0, atol=1e-6)


def test_constraint_that_is_seen_is_not_zero():
    logits = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    penalty = -kl_k1(logits.detach().log_softmax(-1), torch.zeros(3, dtype=torch.float64).log_softmax(-1))
    for baseline in ("mean", "leave_one_out"):
        pull = expected_gradient(logits, penalty, 2, baseline=baseline, scale="none")
        assert pull[0] < -0.05  # back towards the flat reference
