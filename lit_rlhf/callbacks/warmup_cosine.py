"""Learning-rate schedule: linear warm-up, then cosine."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L

from lit_rlhf.callbacks.clashes import refuse_clashes
from lit_rlhf.callbacks.token_budget import TokenBudget
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional.schedules import warmup_cosine

_log = logging.getLogger(__name__)


class WarmupCosine(L.Callback):
    """Scale every parameter group's learning rate by a linear warm-up, then half a cosine down to ``floor``.

    Acts in ``on_train_start``, ``on_train_epoch_start`` and ``on_train_batch_end``: it always shows the rate of the
    *coming* optimizer step, so a LearningRateMonitor reads the right one in any order of callbacks. The factor depends
    only on ``global_step``, or on the tokens that a TokenBudget has counted, so a resumed run continues the curve.

    Args:
        warmup_ratio: Share of all optimizer steps spent rising, in ``[0, 1]``. Ignored if ``warmup_steps`` is given.
        warmup_steps: Optimizer steps spent rising.
        floor: Lowest factor, reached after the last step, in ``[0, 1]``.
        total_steps: Length of the schedule in optimizer steps. By default the whole run: until a
            :class:`~lit_rlhf.callbacks.TokenBudget` is spent, else the Trainer's ``max_steps``, or ``max_epochs`` times
            the optimizer steps of an iteration.
        groups: Names of the parameter groups that it scales, for instance ``[policy]`` while another one scales
            ``[value]``; all of them by default. Groups that no schedule names keep their rate.
    """

    def __init__(
        self,
        warmup_ratio: float = 0.03,
        warmup_steps: int | None = None,
        floor: float = 0.0,
        total_steps: int | None = None,
        groups: list[str] | None = None,
    ) -> None:
        for name, value in (("warmup_ratio", warmup_ratio), ("floor", floor)):
            if not 0.0 <= value <= 1.0:
                raise ConfigurationError(f"WarmupCosine: {name} must lie in [0, 1], got {value}")
        for name, steps, least in (("warmup_steps", warmup_steps, 0), ("total_steps", total_steps, 1)):
            if steps is not None and steps < least:
                raise ConfigurationError(f"WarmupCosine: {name} must be at least {least}, got {steps}")
        self.warmup_ratio = warmup_ratio
        self.warmup_steps = warmup_steps
        self.floor = floor
        self.total_steps = total_steps
        self.groups = groups
        self._total: int | None = None
        self._budget: TokenBudget | None = None
        self._peaks: dict[str, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse an endless run, and a second schedule of the same rates, before anything is generated."""
        if stage != "fit":
            return
        self._peaks = {}  # of a run of its own; a resumed one gets its checkpoint's
        refuse_clashes(trainer)
        budgets = [callback for callback in trainer.callbacks if isinstance(callback, TokenBudget)]  # type: ignore[attr-defined]
        self._budget = budgets[0] if budgets and self.total_steps is None else None
        if self.total_steps is None and self._budget is None and is_endless(trainer):
            raise ConfigurationError(
                "WarmupCosine needs the length of the run: set the Trainer's max_epochs or max_steps, "
                "add TokenBudget, or set WarmupCosine(total_steps=...)"
            )

    @property
    def sets(self) -> tuple[str, ...]:
        """The learning rates that it writes."""
        return ("learning rate",) if self.groups is None else tuple(f"learning rate/{name}" for name in self.groups)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a scheduler of the module's own, whose rates would be overwritten, and unknown groups."""
        if trainer.lr_scheduler_configs:
            scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ConfigurationError(
                f"WarmupCosine and the {scheduler} of {type(pl_module).__name__}.configure_optimizers both set the "
                "learning rate: keep one of them"
            )
        names = [group.get("name") for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for name in self.groups or []:
            if name not in names:
                raise ConfigurationError(
                    f"WarmupCosine: there is no parameter group {name!r}, {type(pl_module).__name__} has "
                    f"{', '.join(repr(known) for known in names)}"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the schedule's length and set the first rate."""
        self._total = None if self._budget else self.total_steps or run_length(trainer)
        for place, group in enumerate(trainer.optimizers[0].param_groups):
            configured = getattr(pl_module, "lr", None)
            # Not every strategy brings the optimizer's own note back from a checkpoint.
            initial = self._peaks.setdefault(_key(place, group), group.get("initial_lr", group["lr"]))
            group["initial_lr"] = initial
            if group.get("name") == "policy" and configured is not None and initial != configured:
                _log.warning(
                    "lr: the checkpoint's %g is kept; the configured %g is not used on resume", initial, configured
                )
        self._write(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the coming step's rate."""
        self._write(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set the coming step's rate."""
        self._write(trainer)

    # Not as state_dict: Lightning would refuse two of these before they could say what they clash over.

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the rates that the schedule scales, by parameter group."""
        checkpoint.setdefault("peak_learning_rates", {}).update(self._peaks)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with them."""
        self._peaks = dict(checkpoint.get("peak_learning_rates", {}))

    def _write(self, trainer: L.Trainer) -> None:
        step: float = trainer.global_step
        total: float = self._total or 1
        if self._budget is not None:
            step, total = self._budget.progress(trainer)
        warmup = self.warmup_steps if self.warmup_steps is not None else round(self.warmup_ratio * total)
        factor = warmup_cosine(step, total, min(warmup, total), self.floor)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if self.groups is not None and group.get("name") not in self.groups:
                    continue
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def _key(place: int, group: dict[str, Any]) -> str:
    return str(group.get("name", place))


def is_endless(trainer: L.Trainer) -> bool:
    """Whether neither ``max_epochs`` nor ``max_steps`` ends the run.

    Args:
        trainer: Any.
    """
    return trainer.max_steps == -1 and trainer.max_epochs in (None, -1)


def run_length(trainer: L.Trainer) -> int:
    """Optimizer steps of the whole run, without asking for a train loader (which would be a rollout).

    Args:
        trainer: With ``max_steps`` or ``max_epochs`` set.
    """
    per_iteration = getattr(getattr(trainer, "datamodule", None), "optimizer_steps_per_iteration", None)
    if per_iteration is None:
        return int(trainer.estimated_stepping_batches)
    by_epochs = trainer.max_epochs * per_iteration if trainer.max_epochs not in (None, -1) else None
    by_steps = trainer.max_steps if trainer.max_steps != -1 else None
    return min(length for length in (by_epochs, by_steps) if length is not None)


def run_iterations(trainer: L.Trainer) -> int:
    """Rollouts of the whole run.

    Args:
        trainer: With ``max_steps`` or ``max_epochs`` set, and a RolloutDataModule.
    """
    per_iteration: int = trainer.datamodule.optimizer_steps_per_iteration  # type: ignore[attr-defined]
    return -(-run_length(trainer) // per_iteration)
