from __future__ import annotations

import pytest

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.rollout.sampler import PromptSampler, RankLocalSampler


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


def test_no_prompts_are_refused():
    with pytest.raises(ConfigurationError, match="there are no prompts to draw from"):
        PromptSampler(0, prompts_per_iteration=2)


def test_a_rank_goes_through_all_its_own_items_in_order():
    sampler = RankLocalSampler(["a", "b", "c"])
    assert list(sampler) == list(sampler) == [0, 1, 2]
    assert len(sampler) == 3
