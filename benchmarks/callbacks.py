"""What the callbacks cost: processor time inside the hooks of each, as a share of the quickstart's iterations.

    python benchmarks/callbacks.py [--iterations 40]

Runs the GRPO quickstart with every callback at once, each at its default frequency, and a TensorBoard logger. Each hook
is timed where it is called, so no two runs are compared, and in processor time, so a busy machine does not matter.
DynamicSampling drops dead groups here instead of drawing new ones: sampling is what a redraw is for, not what it costs.
What happens once in a run (banner, export) is not counted; the checkpoint that OveroptimizationMonitor writes is.
The last line is ``callbacks: N.NN % of an iteration``.
"""

from __future__ import annotations

import argparse
import functools
import logging
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.callbacks import (
    AdaptiveKL,
    AdvantageClip,
    DifficultySampler,
    DynamicSampling,
    EarlyStopInnerEpochs,
    OveroptimizationMonitor,
    ReferenceSync,
    SampleTable,
)
from lit_rlhf.rewards import MathAnswer

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart" / "data"
POLICY = Path(__file__).parents[1] / "checkpoints" / "arithmetic"
HOOKS = (
    "on_train_epoch_start",
    "on_rewards_end",
    "on_rollout_end",
    "on_advantages_end",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class Stopwatch(L.Callback):
    """Times the hooks of the other callbacks, and the training without validations."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.total = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin with the training of the second iteration: the first imports and warms up what the others use."""
        if trainer.current_epoch != 1:
            return
        self.total -= time.process_time()
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for hook in HOOKS:
                if callback is not self and hasattr(callback, hook):
                    setattr(callback, hook, self._timed(type(callback).__name__, getattr(callback, hook)))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop."""
        self.total += time.process_time()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop for a validation."""
        if not trainer.sanity_checking:
            self.total += time.process_time()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on."""
        if not trainer.sanity_checking:
            self.total -= time.process_time()

    def _timed(self, name: str, hook: Any) -> Any:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - start

        return call


def run(iterations: int, folder: str) -> tuple[dict[str, float], float]:
    """Seconds in the hooks of each callback and of everything, but for the first iteration and validations.

    Args:
        iterations: Of the quickstart.
        folder: For logs and checkpoints.
    """
    stopwatch = Stopwatch()
    callbacks = [
        AdaptiveKL(target=1.0, horizon=2000),
        AdvantageClip(5.0),
        EarlyStopInnerEpochs(target_kl=1.0),
        DynamicSampling("nothing"),
        ReferenceSync(every_n_iterations=20),
        DifficultySampler(),
        SampleTable(),
        OveroptimizationMonitor(),
        stopwatch,
    ]
    trainer = L.Trainer(
        max_epochs=iterations,
        accelerator="cpu",
        check_val_every_n_epoch=20,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=TensorBoardLogger(folder),
        callbacks=callbacks,
    )
    data = RolloutDataModule(
        str(QUICKSTART / "train.jsonl"),
        val=str(QUICKSTART / "val.jsonl"),
        rewards=MathAnswer(),
        prompts_per_iteration=64,
        group_size=8,
        max_new_tokens=8,
        seed=1,
    )
    trainer.fit(GRPOModule(str(POLICY), lr=3e-4), data)
    return dict(stopwatch.seconds), stopwatch.total


def main() -> None:
    """Parse the options, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        seconds, total = run(options.iterations, folder)
    counted = options.iterations - 1
    print(f"\n{'callback':28} {'ms per iteration':>16} {'share':>8}")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{name:28} {1000 * value / counted:16.3f} {value / total:8.3%}")
    print(f"one iteration: {1000 * total / counted:.1f} ms")
    print(f"callbacks: {100 * sum(seconds.values()) / total:.2f} % of an iteration")


if __name__ == "__main__":
    main()
