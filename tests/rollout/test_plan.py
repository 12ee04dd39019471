from __future__ import annotations

import itertools
import random

import pytest

from lit_rlhf.rollout.plan import ForwardCost, plan_steps

GROUP = 4


@pytest.fixture
def rollout(make_rollout):
    """Eight prompts, four completions each, of very unequal length."""
    generator = random.Random(3)
    prompts = [generator.randint(2, 12) for _ in range(8) for _ in [generator.random()]]
    groups = [group for group in range(8) for _ in range(GROUP)]
    lengths = [generator.randint(1, 30) for _ in groups]
    return make_rollout([prompts[group] for group in groups], lengths, groups)


def rows_of(step):
    return [row for part in step for row in part]


def padded_tokens(rollout, parts):
    prompts, completions = rollout.prompt_lengths.tolist(), rollout.completion_lengths.tolist()
    return [len(part) * (max(prompts[r] for r in part) + max(completions[r] for r in part)) for part in parts]


CUTS = [{}, {"micro_batch_size": 3}, {"micro_batch_tokens": 90}, {"micro_batches": 5}]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("passes", "steps"), [(1, 1), (2, 3), (1, 8)])
def test_every_row_once_in_each_pass(rollout, cut, passes, steps):
    plan = plan_steps(rollout, num_groups=8, passes=passes, steps_per_pass=steps, **cut)
    assert len(plan) == passes * steps
    for number in range(passes):
        rows = [row for step in plan[number * steps : (number + 1) * steps] for row in rows_of(step)]
        assert sorted(rows) == list(range(32))
    assert all(part for step in plan for part in step)


def test_steps_share_the_prompts_evenly(rollout):
    plan = plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=3)
    assert sorted(len(rows_of(step)) for step in plan) == [8, 12, 12]


def test_without_a_limit_a_step_is_one_micro_batch(rollout):
    assert [len(step) for step in plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=2)] == [1, 1]


@pytest.mark.parametrize(
    "cut", [{}, {"micro_batch_size": GROUP}, {"micro_batch_size": 3 * GROUP}, {"micro_batches": 4}]
)
def test_the_completions_of_a_prompt_stay_together(rollout, cut):
    plan = plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=2, **cut)
    for group in range(8):
        mine = set(range(group * GROUP, (group + 1) * GROUP))
        assert sum(bool(mine & set(part)) for step in plan for part in step) == 1


def test_a_group_never_spans_two_steps(rollout):
    plan = plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=5, micro_batch_size=3)
    for group in range(8):
        assert sum(any(row // GROUP == group for row in rows_of(step)) for step in plan) == 1


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_rows_per_micro_batch(rollout, size):
    (step,) = plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=1, micro_batch_size=size)
    assert max(len(part) for part in step) == min(size, 32)
    assert len(step) == -(-32 // size)


@pytest.mark.parametrize("tokens", [45, 90, 200])
def test_tokens_per_micro_batch_count_padding(rollout, tokens):
    (step,) = plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=1, micro_batch_tokens=tokens)
    assert max(padded_tokens(rollout, step)) <= tokens
    # Two neighbours would not have fitted into one part.
    for one, two in itertools.pairwise(step):
        assert padded_tokens(rollout, [[*one, *two]])[0] > tokens


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [60, 130, 250])
def test_micro_batches_are_balanced_by_tokens(rollout, tokens, shared):
    options = {"num_groups": 8, "passes": 1, "steps_per_pass": 1, "shared_prompts": shared}
    (step,) = plan_steps(rollout, **options, micro_batch_tokens=tokens)
    cost = ForwardCost(rollout, shared)
    largest = max(cost(part) for part in step)
    assert largest <= tokens
    # With a lower limit the same rows would need more parts.
    (tighter,) = plan_steps(rollout, **options, micro_batch_tokens=largest - 1)
    assert len(tighter) > len(step)


def test_a_shared_prompt_counts_once_and_padding_not_at_all(make_rollout):
    rollout = make_rollout([10, 10, 3], [1, 5, 4], [0, 0, 1])
    options = {"num_groups": 2, "passes": 1, "steps_per_pass": 1, "shared_prompts": True}
    assert plan_steps(rollout, **options, micro_batch_tokens=23) == [[[0, 1, 2]]]
    assert plan_steps(rollout, **options, micro_batch_tokens=22) == [[[0, 1], [2]]]
    assert plan_steps(rollout, **options, micro_batch_tokens=15) == [[[0], [1], [2]]]
    assert ForwardCost(rollout, shared_prompts=True).alone([0, 1, 2]) == 33


@pytest.mark.parametrize("tokens", [60, 130])
def test_a_group_that_fits_is_not_cut(rollout, tokens):
    (step,) = plan_steps(
        rollout, num_groups=8, passes=1, steps_per_pass=1, micro_batch_tokens=tokens, shared_prompts=True
    )
    cost = ForwardCost(rollout, shared_prompts=True)
    largest = max(cost(part) for part in step)
    for group in range(8):
        mine = list(range(group * GROUP, (group + 1) * GROUP))
        parts = sum(bool(set(mine) & set(part)) for part in step)
        assert parts == 1 or cost(mine) > largest


def test_rows_that_are_not_kept_leave_the_others_in_their_steps(rollout):
    keep = [row % 3 == 0 or row < 4 for row in range(32)]
    options = {"num_groups": 8, "passes": 2, "steps_per_pass": 3, "seed": (5, 2)}
    whole = plan_steps(rollout, **options)
    for step, kept in zip(whole, plan_steps(rollout, **options, keep=keep), strict=True):
        assert sorted(rows_of(kept)) == sorted(row for row in rows_of(step) if keep[row])


def test_tokens_count_the_widest_prompt_and_the_widest_completion(make_rollout):
    """A long prompt with a short completion next to a short prompt with a long one: padded to 10 + 10."""
    rollout = make_rollout([10, 1], [1, 10], [0, 1])
    options = {"num_groups": 2, "passes": 1, "steps_per_pass": 1}
    assert plan_steps(rollout, **options, micro_batch_tokens=39) == [[[0], [1]]]
    assert plan_steps(rollout, **options, micro_batch_tokens=40) == [[[0, 1]]]


def test_a_row_over_the_budget_stands_alone(make_rollout):
    rollout = make_rollout([2, 2, 2], [50, 3, 4], [0, 1, 2])
    (step,) = plan_steps(rollout, num_groups=3, passes=1, steps_per_pass=1, micro_batch_tokens=20)
    assert step == [[0], [2, 1]]


@pytest.mark.parametrize("parts", [1, 2, 5, 32, 40])
def test_number_of_micro_batches(rollout, parts):
    (step,) = plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=1, micro_batches=parts)
    assert len(step) == min(parts, 32)
    sizes = [len(part) for part in step]
    assert max(sizes) - min(sizes) <= 1


def test_steps_do_not_depend_on_the_number_of_ranks(rollout):
    options = {"num_groups": 8, "passes": 2, "steps_per_pass": 3, "seed": (7, 1)}
    whole = plan_steps(rollout, **options)
    parts = [[row for row in range(32) if (row // GROUP) % 2 == rank] for rank in range(2)]
    ranks = [plan_steps(rollout.select(rows), **options) for rows in parts]
    for number, step in enumerate(whole):
        together = [rows[row] for rows, plan in zip(parts, ranks, strict=True) for row in rows_of(plan[number])]
        assert sorted(together) == sorted(rows_of(step))
    assert len({frozenset(rows_of(step)) for step in whole}) == 6


def test_equal_seeds_equal_plans(rollout):
    options = {"num_groups": 8, "passes": 2, "steps_per_pass": 4, "micro_batch_size": 5}
    plan = plan_steps(rollout, **options, seed=(1, 2))
    assert plan == plan_steps(rollout, **options, seed=(1, 2))
    assert plan != plan_steps(rollout, **options, seed=(1, 3))
    assert plan != plan_steps(rollout, **options, seed=(2, 2))
    assert plan[:4] != plan[4:]  # each pass shuffles anew


def test_more_steps_than_local_prompts(make_rollout):
    """A rank with two of the five prompts has empty steps where another rank has rows."""
    rollout = make_rollout([1] * 4, [1] * 4, [1, 1, 4, 4])
    plan = plan_steps(rollout, num_groups=5, passes=1, steps_per_pass=5)
    assert sorted(len(rows_of(step)) for step in plan) == [0, 0, 0, 2, 2]
    assert plan.count([]) == 3
    assert plan_steps(rollout.select([]), num_groups=5, passes=1, steps_per_pass=2) == [[], []]


def test_rows_are_ordered_so_that_less_is_padding(rollout):
    (step,) = plan_steps(rollout, num_groups=8, passes=1, steps_per_pass=1, micro_batch_size=GROUP)
    ours = sum(padded_tokens(rollout, step))
    generator = random.Random(0)
    shuffled = []
    for _ in range(50):
        rows = generator.sample(range(32), 32)
        shuffled.append(sum(padded_tokens(rollout, [rows[i : i + GROUP] for i in range(0, 32, GROUP)])))
    assert ours < min(shuffled)
    longest = [max((rollout.prompt_lengths + rollout.completion_lengths)[part].tolist()) for part in step]
    assert longest == sorted(longest, reverse=True)


def test_padding_is_what_no_row_asked_for(make_rollout):
    rollout = make_rollout([10, 1], [1, 10], [0, 1])
    assert ForwardCost(rollout, shared_prompts=False).padding([0, 1]) == 40 - 22
    assert ForwardCost(rollout, shared_prompts=True).padding([0, 1]) == 0
