from __future__ import annotations

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lit_rlhf.callbacks import Distributions
from lit_rlhf.callbacks.distributions import histograms
from lit_rlhf.errors import ConfigurationError

NAMES = ("reward", "group/reward_std", "completion/length")


def test_each_has_the_mean_of_the_scalar_of_its_name(fit, tmp_path, watch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    fit(None, [Distributions(every_n_iterations=2)], max_epochs=3, logger=logger, log_every_n_steps=1)
    events = EventAccumulator(logger.log_dir, size_guidance={"histograms": 0}).Reload()
    for name in NAMES:
        assert [event.step for event in events.Histograms(name)] == [0, 2]
        histogram = events.Histograms(name)[-1].histogram_value
        assert histogram.sum / histogram.num == pytest.approx(watch.final[name], rel=1e-5)
    rollout = watch.rollouts[-1]
    assert events.Histograms("reward")[-1].histogram_value.num == len(rollout)
    assert events.Histograms("group/reward_std")[-1].histogram_value.num == len(rollout.group_index.unique())


def test_unscored_completions_are_left_out(fit, watch):
    fit(max_epochs=1)
    rollout = watch.rollouts[0]
    half = rollout.replace(scored_mask=rollout.group_index < 3)
    assert len(histograms(half)["reward"]) == int((rollout.group_index < 3).sum())
    assert histograms(rollout.replace(scored_mask=torch.zeros_like(rollout.scored_mask))).keys() == set(NAMES[1:])


def test_there_by_default_and_silent_without_tensorboard(fit, weights):
    module = fit()
    assert sum(isinstance(callback, Distributions) for callback in module.trainer.callbacks) == 1
    assert weights(module).equal(weights(fit(None, [Distributions(1)])))


def test_bad_options():
    with pytest.raises(ConfigurationError, match="Distributions: every_n_iterations must be a number"):
        Distributions(0)
