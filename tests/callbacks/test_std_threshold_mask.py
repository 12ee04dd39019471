from __future__ import annotations

import logging

import pytest
import torch

from lit_rlhf.callbacks import StdThresholdMask
from lit_rlhf.errors import ConfigurationError


@pytest.mark.parametrize(("threshold", "dead"), [(1e-6, [0]), (0.05, [0, 1]), (0.6, [0, 1, 2])])
def test_groups_that_agree_get_zero(make_hand_made, threshold, dead):
    """Deviations 0, 0.05 and 0.5."""
    rollout = make_hand_made([0.7, 0.7, 0.7, 0.6, 0.0, 1.0], [0, 0, 1, 1, 2, 2])
    module = type("Grouped", (), {"uses_group_baseline": True})()
    masked = StdThresholdMask(threshold).on_advantages_end(None, module, rollout)
    for group in range(3):
        rows = rollout.group_index == group
        expected = torch.zeros(2, 3) if group in dead else rollout.advantages[rows]
        assert torch.equal(masked.advantages[rows], expected)
    assert masked.replace(advantages=rollout.advantages).rewards is rollout.rewards
    assert masked.completion_mask is rollout.completion_mask


def test_the_mask_keeps_what_it_masks_even_if_it_is_infinite(make_hand_made):
    rollout = make_hand_made([0.7, 0.7], [0, 0])
    rollout = rollout.replace(advantages=torch.full((2, 3), float("nan")))
    module = type("Grouped", (), {"uses_group_baseline": True})()
    assert (StdThresholdMask().on_advantages_end(None, module, rollout).advantages == 0).all()


def test_without_groups_it_does_nothing_and_says_so_once(make_hand_made, caplog):
    class Ungrouped:
        uses_group_baseline = False

    rollout = make_hand_made([0.7, 0.7], [0, 0])
    mask = StdThresholdMask()
    with caplog.at_level(logging.INFO, logger="lit_rlhf"):
        assert [mask.on_advantages_end(None, Ungrouped(), rollout) for _ in range(3)] == [None] * 3
    assert caplog.text.count("Ungrouped compares no groups, nothing is masked") == 1


def test_a_mask_of_ones_own_replaces_the_default(fit, watch):
    """With a threshold above every deviation nothing is learned."""
    module = fit(None, [StdThresholdMask(10.0)])
    masks = [callback for callback in module.trainer.callbacks if isinstance(callback, StdThresholdMask)]
    assert [mask.zero_adv_threshold for mask in masks] == [10.0]
    assert watch.final["policy/dead_steps"] == 1.0


def test_a_negative_threshold_is_refused():
    with pytest.raises(ConfigurationError, match="zero_adv_threshold must not be negative, got -1"):
        StdThresholdMask(-1.0)
