"""Steer the KL coefficient towards a target KL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.callbacks.warmup_cosine import is_endless, run_iterations
from lit_rlhf.errors import ConfigurationError, check_number
from lit_rlhf.functional.kl import adaptive_kl_coef
from lit_rlhf.functional.schedules import annealed
from lit_rlhf.modules.scoring import rollout_kl

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch


class AdaptiveKL(RolloutCallback):
    """Raise the KL coefficient while the policy is further from the reference than wanted, lower it while it is nearer.

    Acts in ``on_advantages_end``, where it measures the rollout's KL over all ranks, and changes the module's
    ``kl_coef`` after the iteration's last micro-batch: the coefficient of one rollout is one number, the new one holds
    from the next rollout on. The coefficient is part of the checkpoint. ``kl_coef`` of the module is where it starts.

    Args:
        target: Wanted KL, in nats per completion, or per token with ``per="token"``.
        horizon: Completions over which an error of a fifth or more moves the coefficient by a fifth; at least those of
            one iteration.
        per: Unit of ``target``: the sum over a ``sequence``, averaged over completions, or the mean per ``token``.
        final_target: Wanted at the end of the run; the target moves there in equal steps from iteration to iteration.
            A smaller one than ``target`` is loose early and tight later.
    """

    sets = ("KL coefficient",)

    def __init__(
        self,
        target: float,
        horizon: int = 10_000,
        per: Literal["sequence", "token"] = "sequence",
        final_target: float | None = None,
    ) -> None:
        check_number("AdaptiveKL: target", target, above=0)
        check_number("AdaptiveKL: final_target", final_target, above=0)
        check_number("AdaptiveKL: horizon", horizon, minimum=1)
        if per not in ("sequence", "token"):
            raise ConfigurationError(f"AdaptiveKL: per must be 'sequence' or 'token', got {per!r}")
        self.target = target
        self.horizon = horizon
        self.per = per
        self.final_target = final_target
        self.next_coef: float | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot be steered, before anything is loaded."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.next_coef = None
        if not getattr(pl_module, "kl_coef", 0.0) > 0:
            raise ConfigurationError("AdaptiveKL scales kl_coef, which must be positive to start with")
        data = trainer.datamodule  # type: ignore[attr-defined]
        completions = data.prompts_per_iteration * data.group_size
        if self.horizon < completions:
            raise ConfigurationError(
                f"AdaptiveKL: horizon={self.horizon} is less than the {completions} completions of one iteration"
            )
        if self.final_target is not None and is_endless(trainer):
            raise ConfigurationError(
                "AdaptiveKL: final_target is that of the end of the run: set the Trainer's max_epochs or max_steps"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue with the checkpoint's coefficient."""
        self._apply(pl_module)

    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        """Measure the KL of the rollout."""
        kl = rollout_kl(rollout)
        if kl is None:
            return
        total = kl.double().sum()
        sums = torch.stack([total, rollout.completion_mask.sum().to(total), total.new_tensor(len(rollout))])
        kl_sum, tokens, completions = trainer.strategy.reduce(sums, reduce_op="sum").tolist()
        count = completions if self.per == "sequence" else tokens
        if count > 0:
            target = self.target_of(trainer)
            self.next_coef = adaptive_kl_coef(rollout.kl_coef, kl_sum / count, target, int(completions), self.horizon)

    def target_of(self, trainer: L.Trainer) -> float:
        """The wanted KL of the current iteration.

        Args:
            trainer: Knows the iteration and the length of the run.
        """
        if self.final_target is None:
            return self.target
        last = max(1, run_iterations(trainer) - 1)
        return annealed(self.target, self.final_target, trainer.datamodule.iteration / last)  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set the next iteration's coefficient, once this one is done."""
        if not trainer.datamodule.mid_iteration:  # type: ignore[attr-defined]
            self._apply(pl_module)

    def _apply(self, module: L.LightningModule) -> None:
        if self.next_coef is not None:
            module.kl_coef = self.next_coef  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """The coefficient of the next iteration, the same on all ranks."""
        return {"next_coef": self.next_coef}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say so if the run had no such callback, and start from the module's coefficient."""
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            rank_zero_warn("AdaptiveKL: the checkpoint holds no coefficient, so it starts from the module's kl_coef")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until fit starts."""
        self.next_coef = state_dict["next_coef"]
