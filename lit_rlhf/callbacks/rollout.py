"""The three hooks that Lightning does not have: they see the rollout, and may replace it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L

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

    def on_rewards_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Rewards are known, nothing dearer was computed yet: drop, redraw or re-score rows here."""

    def on_rollout_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Reference (and old) log-probs are known, advantages are not."""

    def on_advantages_end(
        self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch
    ) -> RolloutBatch | None:
        """Advantages are known; next the rollout is cut into optimizer steps."""
