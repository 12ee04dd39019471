"""Let the reference follow the policy."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import ConfigurationError, check_number
from lit_rlhf.models.reference import FrozenReference
from lit_rlhf.strategies import shards_weights


class ReferenceSync(RolloutCallback):
    """Move the reference towards the policy, so that the KL penalty limits the speed of a run, not its distance.

    Acts in ``on_train_batch_end`` after the last micro-batch of every n-th iteration and changes the weights of the
    module's reference: ``reference = (1 - weight) * reference + weight * policy``. ``weight=1`` makes it a copy now and
    then, a small weight with ``every_n_iterations=1`` a moving average. The reference becomes part of the checkpoint,
    which grows by a copy of the model. ``kl`` is the distance from the moved reference.

    Source: Gorbatovski et al., *Learn Your Reference Model for Real Good Alignment* (arXiv 2404.09656).

    Not possible with adapters, whose reference is the shared base model with the adapter switched off: there is no copy
    that could move. Nor with sharded weights, of which a callback could save no more than one rank's.

    Args:
        every_n_iterations: How often.
        weight: Of the policy, in (0, 1].
    """

    sets = ("reference",)

    def __init__(self, every_n_iterations: int = 1, weight: float = 1.0) -> None:
        check_number("ReferenceSync: every_n_iterations", every_n_iterations, minimum=1)
        check_number("ReferenceSync: weight", weight, above=0, maximum=1)
        self.every_n_iterations = every_n_iterations
        self.weight = weight
        self._reference: FrozenReference | None = None
        self._restored: dict[str, Tensor] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what has no reference of its own, before anything is loaded."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._restored = None
        if not getattr(pl_module, "kl_coef", 0.0) > 0:
            raise ConfigurationError("ReferenceSync: with kl_coef=0 there is no reference to move")
        if getattr(pl_module, "lora_rank", 0):
            raise ConfigurationError(
                "ReferenceSync: with lora_rank the reference is the base model with the adapter switched off, which "
                "cannot move; train all weights (lora_rank=0), or start a new run from the exported policy now and then"
            )
        if shards_weights(trainer):
            raise ConfigurationError(
                f"ReferenceSync: {type(trainer.strategy).__name__} shards the reference, which could not be saved "
                "whole; use one device or ddp"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue with the checkpoint's reference."""
        self._reference = pl_module.reference  # type: ignore[assignment]
        assert self._reference is not None
        if self._restored is not None:
            self._reference.model.load_state_dict(self._restored)
            self._restored = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the reference, once the iteration is done."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not data.mid_iteration and data.iteration % self.every_n_iterations == 0:
            self._move(pl_module.policy)  # type: ignore[arg-type]

    @torch.no_grad()
    def _move(self, policy: torch.nn.Module) -> None:
        assert self._reference is not None
        for own, new in zip(self._reference.model.parameters(), policy.parameters(), strict=True):
            if self.weight == 1:
                own.copy_(new)
            else:
                own.lerp_(new.to(own.dtype), self.weight)

    def state_dict(self) -> dict[str, Any]:
        """The reference's weights, the same on all ranks."""
        return {} if self._reference is None else {"reference": self._reference.model.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep them until fit starts."""
        self._restored = state_dict.get("reference")
