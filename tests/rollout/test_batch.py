from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from lit_rlhf.rollout.batch import MicroBatch


@pytest.fixture
def rollout(make_rollout):
    return make_rollout([2, 3, 1, 1], [4, 1, 2, 3], [0, 0, 1, 1])


def test_replace_makes_a_copy(rollout):
    changed = rollout.replace(rewards=torch.full((4,), 7.0), kl_coef=0.5)
    assert changed.rewards.tolist() == [7.0] * 4
    assert changed.kl_coef == 0.5
    assert rollout.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert rollout.kl_coef == 0.0
    assert changed.completion_ids is rollout.completion_ids


def test_nothing_is_edited_in_place(rollout):
    with pytest.raises(FrozenInstanceError):
        rollout.rewards = torch.zeros(4)
    with pytest.raises(FrozenInstanceError):
        MicroBatch(rollout, 1.0).denominator = 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("rewards", torch.zeros(3)), ("advantages", torch.zeros(5, 4)), ("completions", ("a",)), ("returns", [])],
)
def test_replace_wants_one_entry_per_row(rollout, name, value):
    with pytest.raises(ValueError, match=rf"{name} must have 4 rows, got {len(value)}; use select\(\) to drop rows"):
        rollout.replace(**{name: value})


def test_a_field_may_be_taken_away(rollout):
    filled = rollout.replace(advantages=torch.ones(4, 4))
    assert filled.replace(advantages=None).advantages is None


def test_the_mask_may_have_holes_but_never_covers_padding(rollout):
    holes = rollout.completion_mask.clone()
    holes[0, 1] = False
    assert rollout.replace(completion_mask=holes).completion_mask[0].tolist() == [True, False, True, True]
    beyond = rollout.completion_mask.clone()
    beyond[1, 1] = True
    with pytest.raises(ValueError, match="completion_mask is True beyond a completion's length"):
        rollout.replace(completion_mask=beyond)


@pytest.mark.parametrize("rows", [[3, 1], torch.tensor([3, 1])])
def test_select_keeps_the_order_it_is_given(rollout, rows):
    chosen = rollout.replace(advantages=torch.arange(16.0).reshape(4, 4)).select(rows)
    assert len(chosen) == 2
    assert chosen.completion_ids[:, 0].tolist() == [300, 100]
    assert chosen.prompt_ids[:, 0].tolist() == [300, 100]
    assert chosen.completion_lengths.tolist() == [3, 1]
    assert chosen.group_index.tolist() == [1, 0]
    assert chosen.prompt_index.tolist() == [51, 50]
    assert chosen.advantages[:, 0].tolist() == [12.0, 4.0]
    assert chosen.rewards.tolist() == [3.0, 1.0]
    assert chosen.prompts == ("p3", "p1")
    assert chosen.completions == ("c3", "c1")
    assert chosen.reward_names == ("r",)
    assert chosen.ref_log_probs is None


def test_select_by_a_mask(rollout):
    assert rollout.select(rollout.rewards >= 2).completions == ("c2", "c3")
    assert rollout.select(torch.ones(4, dtype=torch.bool)).completions == rollout.completions


def test_select_nothing(rollout):
    for nothing in ([], torch.zeros(4, dtype=torch.bool)):
        empty = rollout.select(nothing)
        assert len(empty) == 0
        assert empty.completion_ids.shape == (0, 4)
        assert empty.completions == ()
        assert empty.trim().completion_ids.shape == (0, 1)


def test_trim_drops_only_columns_that_are_padding_everywhere(rollout):
    part = rollout.replace(old_log_probs=rollout.sampling_log_probs).select([2, 1]).trim()
    # Prompts are padded on the left: the last three columns of three stay; completions on the right.
    assert part.prompt_ids.tolist() == [[200, 201, 202], [100, 101, 102]]
    assert part.completion_ids.tolist() == [[200, 201], [100, 101]]
    assert part.old_log_probs.tolist() == [[-200.0, -201.0], [-100.0, -101.0]]
    assert part.completion_mask.tolist() == [[True, True], [True, False]]
    assert part.advantages is None
    short = rollout.select([2]).trim()
    assert short.prompt_ids.tolist() == [[202]]
    assert short.rewards.tolist() == [2.0]


def test_a_blank_row_counts_nowhere(rollout):
    filled = rollout.replace(advantages=torch.ones(4, 4))
    for source in (filled, filled.select([])):
        blank = source.blank_row()
        assert len(blank) == 1
        assert blank.prompt_ids.shape == blank.completion_ids.shape == blank.advantages.shape == (1, 1)
        assert blank.prompt_lengths.tolist() == blank.completion_lengths.tolist() == [1]
        assert not blank.completion_mask.any()
        assert not blank.scored_mask.any()
        assert blank.advantages.tolist() == [[0.0]]
        assert blank.reward_components.shape == (1, 1)
        assert blank.completions == ("",)
        assert blank.ref_log_probs is None
        assert blank.completion_ids.dtype == torch.long


def test_to_moves_every_tensor_and_nothing_else(rollout):
    moved = rollout.to("meta")
    assert moved.completion_ids.device.type == moved.rewards.device.type == moved.group_index.device.type == "meta"
    assert moved.completions == rollout.completions
    assert moved.advantages is None
    batch = MicroBatch(rollout, 12.0, step=2, last_of_step=False, dead_step=True, ratio_is_one=True).to("meta")
    assert batch.rows.completion_mask.device.type == "meta"
    assert (batch.denominator, batch.step, batch.last_of_step, batch.dead_step) == (12.0, 2, False, True)
    assert batch.ratio_is_one
    assert len(batch) == 4


def test_join_pads_to_the_wider_and_keeps_every_row(make_rollout):
    one = make_rollout([2, 1], [1, 2], [0, 1])
    two = make_rollout([3], [4], [5], token_rewards=torch.ones(1, 4))
    both = one.join(two)
    assert len(both) == 3
    for place, (owner, row) in enumerate([(one, 0), (one, 1), (two, 0)]):
        mine, theirs = both.select([place]).trim(), owner.select([row]).trim()
        for name in {field.name for field in fields(mine)} - {"token_rewards"}:
            value, expected = getattr(mine, name), getattr(theirs, name)
            assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected, name
    assert both.token_rewards.tolist() == [[0] * 4, [0] * 4, [1] * 4]
    assert both.completion_ids.shape == (3, 4)
    assert both.prompt_ids.shape == (3, 3)


def test_join_with_nothing(make_rollout):
    rows, nothing = make_rollout([2, 1], [1, 2], [0, 1]), make_rollout([], [], [])
    for both in (rows.join(nothing), nothing.join(rows)):
        assert torch.equal(both.completion_ids, rows.completion_ids)
        assert both.prompts == rows.prompts


def test_join_of_different_stages_is_refused(make_rollout):
    rows = make_rollout([2], [1], [0])
    with pytest.raises(ValueError, match="only one of the two batches has advantages"):
        rows.join(rows.replace(advantages=torch.zeros(1, 1)))
