"""Let the KL coefficient go from one value to another over the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.callbacks.warmup_cosine import is_endless, run_iterations
from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.functional.schedules import ANNEALS, Anneal, annealed

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch


class KLSchedule(RolloutCallback):
    """Hold the policy loosely at first, tighter later: the KL coefficient goes from ``start`` to ``end``.

    Acts in ``on_rewards_end``, before the rollout is given its coefficient, and sets the module's ``kl_coef``: one
    number for the whole iteration. It depends on the number of the iteration alone, so a resumed run continues the
    curve. The module's own ``kl_coef`` is not used, but must be positive: at 0 there is no reference.

    Args:
        start: Coefficient of the first iteration.
        end: Coefficient of the last iteration; usually the larger one.
        shape: Of the way: ``linear``, ``cosine`` (slow at both ends) or ``geometric`` (equal factors).
        iterations: Reach ``end`` after this many iterations and stay there; the whole run by default.
    """

    sets = ("KL coefficient",)

    def __init__(self, start: float, end: float, shape: Anneal = "linear", iterations: int | None = None) -> None:
        check_number("KLSchedule: start", start, above=0)
        check_number("KLSchedule: end", end, above=0)
        check_number("KLSchedule: iterations", iterations, minimum=1)
        check_choice("KLSchedule: shape", shape, ANNEALS)
        self.start = start
        self.end = end
        self.shape: Anneal = shape
        self.iterations = iterations

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot be scheduled, before anything is loaded."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if not getattr(pl_module, "kl_coef", 0.0) > 0:
            raise ConfigurationError("KLSchedule needs a reference: set the module's kl_coef to a positive number")
        if self.iterations is None and is_endless(trainer):
            raise ConfigurationError(
                "KLSchedule needs the length of the run: set the Trainer's max_epochs or max_steps, "
                "or KLSchedule(iterations=...)"
            )

    def on_rewards_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        """Set the coefficient that this rollout is going to be given."""
        iteration = trainer.datamodule.iteration  # type: ignore[attr-defined]
        last = (self.iterations or run_iterations(trainer)) - 1
        progress = iteration / last if last > 0 else float(iteration > 0)
        module.kl_coef = annealed(self.start, self.end, progress, self.shape)  # type: ignore[assignment]
