from __future__ import annotations

import pytest

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.rollout.sampler import PromptSampler, PromptTurns, RankLocalSampler


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_last_iteration_of_a_pass_holds_what_is_left(shuffle):
    sampler = PromptSampler(5, prompts_per_iteration=2, seed=3, shuffle=shuffle)
    for data_pass in range(4):
        drawn = [sampler.draw(3 * data_pass + number) for number in range(3)]
        assert [len(part) for part in drawn] == [2, 2, 1]
        assert sorted(index for part in drawn for index in part) == [0, 1, 2, 3, 4]


def test_fewer_prompts_than_an_iteration_draws():
    sampler = PromptSampler(3, prompts_per_iteration=4, seed=0)
    for iteration in range(5):
        assert sorted(sampler.draw(iteration)) == [0, 1, 2]


def test_each_pass_has_an_order_of_its_own():
    sampler = PromptSampler(20, prompts_per_iteration=20, seed=0)
    orders = [tuple(sampler.draw(iteration)) for iteration in range(5)]
    assert len(set(orders)) == 5
    in_file_order = PromptSampler(20, prompts_per_iteration=20, shuffle=False)
    assert in_file_order.draw(0) == in_file_order.draw(7) == list(range(20))


def test_an_iteration_depends_on_its_number_alone():
    one, other = (PromptSampler(12, prompts_per_iteration=5, seed=7) for _ in range(2))
    forwards = [one.draw(iteration) for iteration in range(9)]
    backwards = [other.draw(iteration) for iteration in reversed(range(9))]
    assert forwards == backwards[::-1]
    assert forwards != [PromptSampler(12, prompts_per_iteration=5, seed=8).draw(iteration) for iteration in range(9)]


@pytest.mark.parametrize("kind", [PromptSampler, PromptTurns])
def test_more_prompts_are_others_and_leave_later_draws_alone(kind):
    sampler, plain = kind(20, prompts_per_iteration=6, seed=1), kind(20, prompts_per_iteration=6, seed=1)
    drawn = sampler.draw(3)
    first = sampler.draw_more(3, 1, 5, drawn)
    second = sampler.draw_more(3, 2, 30, drawn + first)
    assert len(first) == 5
    assert sorted(drawn + first + second) == list(range(20))
    assert sampler.draw_more(3, 3, 1, range(20)) == []
    assert sampler.draw_more(3, 1, 5, drawn) == first
    assert [sampler.draw(iteration) for iteration in range(6)] == [plain.draw(iteration) for iteration in range(6)]


def test_further_draws_are_random_among_what_is_left():
    sampler = PromptSampler(30, prompts_per_iteration=2, seed=1, shuffle=False)
    draws = {tuple(sampler.draw_more(iteration, attempt, 3, [0])) for iteration in range(4) for attempt in (1, 2)}
    assert len(draws) == 8
    assert len({index for draw in draws for index in draw}) > 12


def test_turns_follow_the_weights():
    weights = [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.1]
    sampler = PromptTurns(7, prompts_per_iteration=3, seed=4)
    counts = [0] * 7
    for iteration in range(400):
        drawn = sampler.draw(iteration)
        assert len(set(drawn)) == 3
        sampler.put_back(drawn, [weights[index] for index in drawn])
        for index in drawn:
            counts[index] += 1
    full = sum(counts) / sum(weights)
    assert counts == pytest.approx([weight * full for weight in weights], abs=2)


def test_turns_of_equal_weight_are_passes_in_a_random_order():
    sampler = PromptTurns(12, prompts_per_iteration=4, seed=4)
    orders = []
    for data_pass in range(5):
        order = []
        for number in range(3):
            order += sampler.draw(3 * data_pass + number)
            sampler.put_back(order[-4:], [1.0] * 4)
        assert sorted(order) == list(range(12))
        orders.append(tuple(order))
    assert len(set(orders)) == 5


def test_no_prompts_are_refused():
    with pytest.raises(ConfigurationError, match="there are no prompts to draw from"):
        PromptSampler(0, prompts_per_iteration=2)


def test_a_rank_goes_through_all_its_own_items_in_order():
    sampler = RankLocalSampler(["a", "b", "c"])
    assert list(sampler) == list(sampler) == [0, 1, 2]
    assert len(sampler) == 3
