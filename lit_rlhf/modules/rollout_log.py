"""What an iteration's log says about its rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lit_rlhf.functional.advantages import dead_groups, group_std
from lit_rlhf.functional.diversity import group_copies, repeated_ngrams
from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.modules.scoring import rollout_kl

if TYPE_CHECKING:
    from lit_rlhf.metrics.iteration import IterationMetrics
    from lit_rlhf.rollout.batch import RolloutBatch

ROLLOUT_MEANS = (
    "reward",
    "reward/mean_square",
    "reward/missing",
    "group/effective_ratio",
    "group/reward_std",
    "group/distinct",
    "group/same_pairs",
    "kl",
    "kl/per_token",
    "completion/length",
    "completion/finished_length",
    "completion/truncated",
    "completion/repetition",
    "policy/dead_steps",
    "policy/skipped_steps",
    "policy/grad_norm",
    "policy/first_step_ratio_gap_mean",
    "sampling/log_prob_gap_mean",
    "sampling/entropy",
    "sampling/staleness",
)
ROLLOUT_MAXIMA = ("reward/max", "completion/max_length")
ROLLOUT_MINIMA = ("reward/min",)


def add_rollout(metrics: IterationMetrics, rollout: RolloutBatch) -> None:
    """Add the rollout's own quantities.

    Args:
        metrics: Of the iteration.
        rollout: This rank's rows, after the last hook.
    """
    rows, scored = len(rollout), rollout.scored_mask
    if rows == 0:
        return
    lengths = rollout.completion_lengths.float()
    finished = rollout.finished
    group = rollout.group_index
    rewards = rollout.task_rewards
    dead = dead_groups(rewards, group, scored)
    first_rows = _first_rows(group)
    distinct, same_pairs, pairs = group_copies(rollout.completion_ids, rollout.completion_lengths, group)
    repeated, runs = repeated_ngrams(rollout.completion_ids, rollout.completion_lengths)
    means: dict[str, Any] = {
        "reward": (masked_sum(rewards, scored), scored.sum()),
        "reward/mean_square": (masked_sum(rewards.double().square(), scored), scored.sum()),
        "reward/missing": ((~scored).sum(), rows),
        "group/effective_ratio": ((~dead[first_rows]).sum(), len(first_rows)),
        "group/reward_std": (group_std(rewards, group, scored)[first_rows].sum(), len(first_rows)),
        "group/distinct": (distinct, len(first_rows)),
        "group/same_pairs": (same_pairs, pairs),
        "completion/length": (lengths.sum(), rows),
        "completion/finished_length": (lengths[finished].sum(), finished.sum()),
        "completion/truncated": ((~finished).sum(), rows),
        "completion/repetition": (repeated.sum(), runs.sum()),
        "sampling/entropy": (
            -masked_sum(rollout.sampling_log_probs, rollout.completion_mask),
            rollout.completion_mask.sum(),
        ),
    }
    for place, name in enumerate(rollout.reward_names):
        values = rollout.reward_components[:, place]
        means[f"reward/{name}"] = (values.nan_to_num(0.0).sum(), (~values.isnan()).sum())
    if rollout.staleness is not None:
        means["sampling/staleness"] = (rollout.staleness.sum(), rows)
    if rollout.ref_log_probs is not None:
        kl = rollout_kl(rollout)
        assert kl is not None
        means["kl"] = (kl.sum(), rows)
        means["kl/per_token"] = (kl.sum(), rollout.completion_mask.sum())
    maxima, minima = {"completion/max_length": lengths.max()}, {}
    if bool(scored.any()):
        maxima["reward/max"], minima["reward/min"] = rewards[scored].max(), rewards[scored].min()
    metrics.update(means, maxima, minima)


def with_reward_std(values: dict[str, float]) -> dict[str, float]:
    """The deviation of all task rewards instead of their mean square, which ranks can add up.

    Args:
        values: Of an iteration, by name of the metric.
    """
    values = dict(values)
    square = values.pop("reward/mean_square", None)
    if square is not None:
        values["reward/std"] = max(0.0, square - values["reward"] ** 2) ** 0.5
    return values


def _first_rows(group_index: torch.Tensor) -> list[int]:
    first: dict[int, int] = {}
    for row, group in enumerate(group_index.tolist()):
        first.setdefault(group, row)
    return list(first.values())
