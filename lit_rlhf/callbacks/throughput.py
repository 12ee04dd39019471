"""Where an iteration's time goes, how many tokens it moves, and how much memory it takes."""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

if TYPE_CHECKING:
    from lit_rlhf.rollout.datamodule import RolloutDataModule


class Throughput(L.Callback):
    """Log seconds and tokens per second of each phase, the tokens of the run so far and the peak of memory.

    Acts in ``on_train_batch_start`` and ``on_train_batch_end``, where it looks at the clock, and in
    ``on_train_epoch_end``, where it adds ``time/``, ``tokens/`` and ``memory/`` to the module's ``iteration_values``,
    which the module then logs. It waits for no device: work that a GPU still has in its queue is part of the phase that
    waits for it. Tokens are summed over ranks, seconds are those of the first rank. The totals of tokens are part of
    the checkpoint.

    :attr:`tokens` has the totals of the run, :attr:`seconds` those of each phase since this process started.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens = {"generated": 0.0, "trained": 0.0}
        self._started = self._ended = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Training starts with the iteration's first micro-batch."""
        if batch_idx == 0:
            self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """It ends with its last."""
        self._ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the iteration."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        if data.rollout is None:
            return
        seconds = {**data.timer.seconds, "training": self._ended - self._started}
        for phase, value in seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + value
        rows = data.rollout
        scored = 0 if rows.ref_log_probs is None and rows.values is None else _tokens(rows)
        passes = trainer.train_dataloader.dataset  # type: ignore[union-attr]
        own = [data.sampled_tokens, scored, passes.tokens_drawn, passes.tokens_forwarded, passes.tokens_padding]
        device = trainer.strategy.root_device
        counts = trainer.strategy.reduce(torch.tensor(own, dtype=torch.float64, device=device), reduce_op="sum")
        generated, scored, trained, forwarded, padding = counts.tolist()
        peak = trainer.strategy.reduce(torch.tensor(peak_memory_gib(device), device=device), reduce_op="max")
        self.tokens["generated"] += generated
        self.tokens["trained"] += trained
        values = {f"time/{phase}": value for phase, value in seconds.items()}
        values["time/iteration"] = sum(seconds.values())
        values.update({f"tokens/{name}": total for name, total in self.tokens.items()})
        values["tokens/forwarded"] = forwarded
        if forwarded:
            values["tokens/padding"] = padding / forwarded
        # Of what is sampled ahead only the wait is measured, which says nothing about the engine.
        for name, count, phase in (
            ("generated", 0 if data.staleness else generated, "generation"),
            ("rewarded", generated, "rewards"),
            ("scored", scored, "reference"),
            ("trained", trained, "training"),
        ):
            if count and seconds.get(phase):
                values[f"tokens/{name}_per_second"] = count / seconds[phase]
        values["memory/peak_gib"] = float(peak)
        pl_module.iteration_values.update(values)  # type: ignore[operator, union-attr]

    def state_dict(self) -> dict[str, Any]:
        """Tokens of the run so far, over all ranks."""
        return {"tokens": dict(self.tokens)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from there."""
        self.tokens.update(state_dict["tokens"])


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held, in GiB: of the CUDA device, or resident on a CPU.

    Args:
        device: The policy's.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _tokens(rows: Any) -> int:
    """Prompt and completion tokens."""
    return int((rows.prompt_lengths + rows.completion_lengths).sum())
