"""The three hooks that Lightning does not have: they see the rollout, and may replace it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L

from lit_rlhf.callbacks.clashes import refuse_clashes

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch


class RolloutCallback(L.Callback):
    """A Lightning callback that is also called while a rollout is being made.

    The batch is frozen: a hook returns a new one (``rollout.replace(...)``, ``rollout.select(rows)``) or ``None`` to
    leave it as it is. Denominators are computed after the last hook, so rows may be dropped in any of them.
    The hooks run on every rank with that rank's rows, in evaluation mode and without gradients.

    A callback that halves the rewards of truncated completions:

    >>> class HalveTruncated(RolloutCallback):
    ...     def on_rewards_end(self, trainer, module, rollout):
    ...         factor = 0.5 + 0.5 * rollout.finished.float()
    ...         return rollout.replace(rewards=rollout.rewards * factor)
    """

    runs_first = False
    """Whether its hooks run before those of other callbacks, wherever it stands in the Trainer's list."""

    runs_last = False
    """Whether its hooks run after those of the others."""

    sets: tuple[str, ...] = ()
    """What only one callback of a Trainer may set, such as ``KL coefficient``; a second one is refused."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse another callback that sets the same."""
        if stage == "fit":
            refuse_clashes(trainer)

    def on_rewards_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Rewards are known, nothing dearer was computed yet: drop or re-score rows here.

        Called again, with the new rows alone, where a callback has completions drawn anew.
        """

    def on_rollout_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Reference (and old) log-probs are known, advantages are not."""

    def on_advantages_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Advantages are known; next the rollout is cut into optimizer steps."""
