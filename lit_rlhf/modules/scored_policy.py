"""A policy and its reference: log-probs of a rollout, and what of it outlives a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.models.forward import completion_outputs
from lit_rlhf.models.layouts import runs_layouts
from lit_rlhf.models.loading import load_causal_lm
from lit_rlhf.models.lora import REFERENCE_ADAPTER, active_adapter, freeze_adapter, without_adapter
from lit_rlhf.models.reference import FrozenReference, forget_missing_reference
from lit_rlhf.modules.evaluation import HeldOutEvaluation
from lit_rlhf.modules.policy_loss import KLPlacement
from lit_rlhf.modules.pretrained import DTYPES
from lit_rlhf.modules.scoring import by_parts

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch

# Below this gap in float32 the engine's log-probs and the training forward's are the same numbers.
LOG_PROB_TOLERANCE = 1e-5


class ScoredPolicy(HeldOutEvaluation):
    """A policy that is held near a frozen reference: the model as it was before any training.

    With a new adapter the reference is the base with the adapter switched off, with a trained one a frozen copy of that
    adapter, else a second copy of the model. Copies are kept out of checkpoints.

    Args:
        policy: Hub name or folder of the model to train; it is the reference, too.
        kl_coef: Weight of the KL penalty against the reference; at 0 no reference is loaded.
        kl_placement: One of :attr:`kl_placements`.
        options: Of :class:`~lit_rlhf.modules.causal_lm.CausalLMModule`.
    """

    kl_placements: tuple[KLPlacement, ...] = ("reward", "loss")

    def __init__(self, policy: str, kl_coef: float, kl_placement: KLPlacement, **options: Any) -> None:
        super().__init__(policy, **options)
        check_number("kl_coef", kl_coef, minimum=0)
        if self.random_init:
            raise ConfigurationError("reinforcement learning starts from a trained model: leave random_init off")
        check_choice(f"kl_placement of {type(self).__name__}", kl_placement, self.kl_placements)
        self.kl_coef = kl_coef
        self.kl_placement = kl_placement
        self.reference: FrozenReference | None = None
        self.log_prob_gap: float | None = None
        self.register_load_state_dict_post_hook(forget_missing_reference)

    def build_models(self) -> None:
        """Build the policy and, where it is needed, its frozen reference."""
        new = self.policy is None
        super().build_models()
        assert self.policy is not None
        needed = self.kl_coef > 0 and not self.lora_rank and self.is_fitting
        if not needed or self.reference is not None:
            return
        source: nn.Module = self.policy
        if not new:
            # Built for an earlier validation, perhaps of a checkpoint: the reference is the model before any training.
            options = {"dtype": DTYPES[self.dtype_name], "attn_implementation": self.attn_implementation}
            source = load_causal_lm(self.model_name, **options)  # type: ignore[arg-type]
        self.reference = FrozenReference(source)

    def _new_policy(self) -> nn.Module:
        policy = super()._new_policy()
        if self.adapter is not None and self.kl_coef > 0:
            policy = self.add_adapter(policy, REFERENCE_ADAPTER, self.adapter)
            freeze_adapter(policy, REFERENCE_ADAPTER)
        return policy

    def models(self) -> list[nn.Module]:
        """Policy and reference."""
        return [*super().models(), *([] if self.reference is None else [self.reference.model])]

    @property
    def shares_prompts(self) -> bool:
        """Whether the policy's forward pass runs a prompt once for its neighbouring completions."""
        return self.policy is not None and runs_layouts(self.policy)

    def score_rollout(self, rollout: RolloutBatch, parts: list[list[int]], ratio_is_one: bool) -> RolloutBatch:
        """Reference log-probs, and old log-probs where the ratio is not 1 by construction.

        Args:
            rollout: ``N`` rows with rewards.
            parts: Rows of each forward pass.
            ratio_is_one: The rollout serves a single optimizer step.
        """
        changes: dict[str, Any] = {"kl_coef": self.kl_coef}
        penalised = self.kl_coef > 0
        if not ratio_is_one or (penalised and self.kl_placement != "loss"):
            changes["old_log_probs"] = self._old_log_probs(rollout, parts)
        if penalised:
            changes["ref_log_probs"] = self._reference_log_probs(rollout, parts)
        return rollout.replace(**changes)

    def _old_log_probs(self, rollout: RolloutBatch, parts: list[list[int]]) -> Tensor:
        """The engine's own where they were found to equal the training forward's, else a pass of that forward."""
        on_policy = rollout.staleness is None
        if on_policy and self.log_prob_gap is not None and self.log_prob_gap <= LOG_PROB_TOLERANCE:
            return rollout.sampling_log_probs
        return self._policy_log_probs(self.policy, rollout, parts)

    def _reference_log_probs(self, rollout: RolloutBatch, parts: list[list[int]]) -> Tensor:
        """Of the frozen copy of model or adapter, or of the base with the adapter switched off."""
        if self.reference is not None:
            return self._policy_log_probs(self.reference.model, rollout, parts)
        assert self.policy is not None
        own = self.adapter is not None
        with active_adapter(self.policy, REFERENCE_ADAPTER) if own else without_adapter(self.policy):
            return self._policy_log_probs(self.policy, rollout, parts)

    @staticmethod
    def _policy_log_probs(model: nn.Module | None, rollout: RolloutBatch, parts: list[list[int]]) -> Tensor:
        assert model is not None
        return by_parts(rollout, parts, lambda rows: completion_outputs(model, rows, rows.temperature).log_probs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the module remembers between iterations; refuse to save in the middle of one."""
        data = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
        if getattr(data, "mid_iteration", False):
            raise ConfigurationError(
                "a checkpoint in the middle of an iteration would not resume exactly; checkpoint at its end: "
                "ModelCheckpoint(every_n_epochs=1), without every_n_train_steps, train_time_interval, "
                "val_check_interval or OnExceptionCheckpoint"
            )
        super().on_save_checkpoint(checkpoint)
        checkpoint["lit_rlhf"] = {
            "log_prob_gap": self.log_prob_gap,
            "kl_placement": self.kl_placement,
            "held_out": self.last_evaluation,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it; another placement of the KL penalty is another objective and refused."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("lit_rlhf", {})
        placement = saved.get("kl_placement", self.kl_placement)
        if placement != self.kl_placement and self.is_fitting:
            raise ConfigurationError(
                f"the checkpoint was trained with kl_placement={placement!r}, now it is {self.kl_placement!r}: "
                "resume with the same one, or start a new run from the exported policy"
            )
        self.log_prob_gap = saved.get("log_prob_gap")
        self.last_evaluation = saved.get("held_out")
