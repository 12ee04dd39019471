"""Signals of health that are no logged metric but follow from some."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lit_rlhf.callbacks.health.history import RunHistory

SMALL_GROUP = 4
POOR_UP_TO = 0.1


def derived_signals(
    values: Mapping[str, float], history: RunHistory, vocabulary: int, group_size: int, optimizer_steps: int
) -> dict[str, float]:
    """What the rules look at besides the logged metrics; a signal without a value is left out.

    * ``reward/progress``: where the mean reward lies between the lowest (0) and the highest (1) reward of any
      completion so far; for a reward of 0 or 1 it is the share of right answers. Missing while rewards never differed.
    * ``reward/range``: distance of the iteration's highest reward from its lowest.
    * ``reward/between_extremes``: how far the variance of the iteration's rewards stays below the largest that is
      possible for their mean, as a share of it: 0 if and only if there are just two values (the Bhatia-Davis
      inequality). Only where completions are compared in groups of two to four.
    * ``sampling/entropy_while_poor``: ``sampling/entropy`` as a share of that of uniform sampling; 0 unless progress
      is under a tenth or missing.
    * ``value/error_share``: the critic's error over half the range of rewards, or over its own first value where that
      is larger: a scale that neither a rare reward nor an untrained critic upsets.
    * ``loss/share``: absolute loss over the mean absolute advantage, on a rollout that serves one optimizer step.

    Args:
        values: Of the iteration, by name of the metric.
        history: Knows the range of rewards, the current iteration's included.
        vocabulary: Tokens that the policy chooses from.
        group_size: Completions that are compared with each other; 1 where none are.
        optimizer_steps: Of an iteration.
    """
    signals: dict[str, float] = {}
    reward, spread = values.get("reward"), history.reward_range
    if reward is not None and spread > 0:
        signals["reward/progress"] = (reward - history.lowest_reward) / spread
    if reward is not None:
        lowest, highest = values["reward/min"], values["reward/max"]
        signals["reward/range"] = highest - lowest
        largest_variance = (highest - reward) * (reward - lowest)
        if 1 < group_size <= SMALL_GROUP and largest_variance > 0:
            signals["reward/between_extremes"] = 1 - values["reward/std"] ** 2 / largest_variance
    if "sampling/entropy" in values and reward is not None:
        is_poor = signals.get("reward/progress", 0.0) <= POOR_UP_TO
        signals["sampling/entropy_while_poor"] = is_poor * values["sampling/entropy"] / math.log(vocabulary)
    if "value/error" in values:
        scale = max(spread / 2, history.first.get("value/error", values["value/error"]))
        if scale > 0:
            signals["value/error_share"] = values["value/error"] / scale
    advantages = values.get("policy/advantage_abs", 0.0)
    if optimizer_steps == 1 and advantages > 0 and "loss" in values:
        signals["loss/share"] = abs(values["loss"]) / advantages
    return signals
