"""What an iteration's log says about its rollout, its phases and its tokens."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from lit_rlhf.functional.advantages import dead_groups, group_std
from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.modules.scoring import rollout_kl

if TYPE_CHECKING:
    import lightning as L

    from lit_rlhf.metrics.iteration import IterationMetrics
    from lit_rlhf.rollout.batch import RolloutBatch
    from lit_rlhf.rollout.datamodule import RolloutDataModule

ROLLOUT_MEANS = (
    "reward",
    "reward/missing",
    "group/effective_ratio",
    "group/reward_std",
    "group/distinct",
    "kl",
    "kl/per_token",
    "completion/length",
    "completion/finished_length",
    "completion/truncated",
    "policy/dead_steps",
    "policy/skipped_steps",
    "policy/grad_norm",
)


class RolloutLog:
    """Counts tokens and seconds over the run; turns a rollout into sums and counts."""

    def __init__(self) -> None:
        self.training_started = self.training_ended = 0.0
        self.seconds: dict[str, float] = {}
        self.tokens = {"generated": 0.0, "trained": 0.0}

    def add_rollout(self, metrics: IterationMetrics, rollout: RolloutBatch) -> None:
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
        dead = dead_groups(rollout.rewards, group, scored)
        first_rows = _first_rows(group)
        means: dict[str, Any] = {
            "reward": (masked_sum(rollout.rewards, scored), scored.sum()),
            "reward/missing": ((~scored).sum(), rows),
            "group/effective_ratio": ((~dead[first_rows]).sum(), len(first_rows)),
            "group/reward_std": (group_std(rollout.rewards, group, scored)[first_rows].sum(), len(first_rows)),
            "group/distinct": (_distinct(rollout), len(first_rows)),
            "completion/length": (lengths.sum(), rows),
            "completion/finished_length": (lengths[finished].sum(), finished.sum()),
            "completion/truncated": ((~finished).sum(), rows),
        }
        for place, name in enumerate(rollout.reward_names):
            values = rollout.reward_components[:, place]
            means[f"reward/{name}"] = (values.nan_to_num(0.0).sum(), (~values.isnan()).sum())
        if rollout.ref_log_probs is not None:
            kl = rollout_kl(rollout)
            assert kl is not None
            means["kl"] = (kl.sum(), rows)
            means["kl/per_token"] = (kl.sum(), rollout.completion_mask.sum())
        metrics.update(means, {"completion/max_length": lengths.max()})

    def phases(self, data: RolloutDataModule, trainer: L.Trainer) -> dict[str, float]:
        """Seconds, tokens and memory of the iteration, and the totals of the run so far.

        Args:
            data: Timed the rollout.
            trainer: Sums tokens over ranks.
        """
        seconds = dict(data.timer.seconds)
        seconds["training"] = self.training_ended - self.training_started
        for phase, value in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + value
        rollout = data.rollout
        trained = 0.0 if rollout is None else float((rollout.prompt_lengths + rollout.completion_lengths).sum())
        counts = torch.tensor([data.sampled_tokens, trained * data.passes], dtype=torch.float64)
        counts = trainer.strategy.reduce(counts.to(trainer.strategy.root_device), reduce_op="sum")
        generated, trained = counts.tolist()
        self.tokens["generated"] += generated
        self.tokens["trained"] += trained
        values = {f"time/{phase}": value for phase, value in seconds.items()}
        values["time/iteration"] = sum(seconds.values())
        values["tokens/generated"] = self.tokens["generated"]
        values["tokens/trained"] = self.tokens["trained"]
        values["tokens/generated_per_second"] = generated / max(seconds.get("generation", 0.0), 1e-9)
        values["tokens/trained_per_second"] = trained / max(seconds["training"], 1e-9)
        values["memory/peak_gib"] = peak_memory_gib(trainer.strategy.root_device)
        return values


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held, in GiB: of the CUDA device, or resident on a CPU.

    Args:
        device: The policy's.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _first_rows(group_index: torch.Tensor) -> list[int]:
    first: dict[int, int] = {}
    for row, group in enumerate(group_index.tolist()):
        first.setdefault(group, row)
    return list(first.values())


def _distinct(rollout: RolloutBatch) -> int:
    """Distinct token sequences, counted inside each group and summed."""
    rows = zip(
        rollout.group_index.tolist(), rollout.completion_ids.tolist(), rollout.completion_lengths.tolist(), strict=True
    )
    return len({(group, *ids[:length]) for group, ids, length in rows})
