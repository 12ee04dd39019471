"""A causal language model under training: the policy of reinforcement learning, the pupil of supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError, check_number
from lit_rlhf.models.layouts import base_of
from lit_rlhf.models.loading import load_causal_lm
from lit_rlhf.models.lora import add_lora, enable_gradient_checkpointing, is_adapted, merged_model
from lit_rlhf.modules.pretrained import DTYPES, PretrainedModule


class CausalLMModule(PretrainedModule):
    """Builds the policy in ``configure_model``.

    Args:
        policy: Hub name or folder of the model to train. Its tokenizer comes from the same place.
        lr: Learning rate after warm-up.
        random_init: Take only the configuration from ``policy`` and train from new weights.
        lora_rank: Train a low-rank adapter of this rank on the frozen model; 0 trains all weights.
        lora_alpha: The adapter is scaled by ``lora_alpha / lora_rank``; twice the rank by default.
        lora_target_modules: Names of the adapted layers, or ``all-linear``.
        options: Of :class:`~lit_rlhf.modules.pretrained.PretrainedModule`.
    """

    def __init__(
        self,
        policy: str,
        lr: float = 2e-6,
        random_init: bool = False,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_target_modules: str | list[str] = "all-linear",
        **options: Any,
    ) -> None:
        super().__init__(policy, lr, **options)
        check_number("lora_rank", lora_rank, minimum=0)
        check_number("lora_alpha", lora_alpha, above=0)
        if lora_rank and random_init:
            raise ConfigurationError("lora_rank adapts a trained model: it cannot go with random_init")
        self.random_init = random_init
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha
        self.lora_target_modules = lora_target_modules
        self.policy: nn.Module | None = None

    @property
    def trained_model(self) -> nn.Module | None:
        """The policy."""
        return self.policy

    def build_models(self) -> None:
        """Build the policy, once; Lightning calls this at the start of fit, validate, test and predict."""
        if self.policy is None:
            self.policy = self._new_policy()

    def _new_policy(self) -> nn.Module:
        policy: nn.Module = load_causal_lm(
            self.model_name,
            dtype=DTYPES[self.dtype_name],
            random_init=self.random_init,
            attn_implementation=self.attn_implementation,
        )
        if self.gradient_checkpointing:
            enable_gradient_checkpointing(policy)
        if self.lora_rank:
            policy = add_lora(policy, self.lora_rank, self.lora_alpha, self.lora_target_modules)
        return policy

    def write_pretrained(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        """Write the policy; a low-rank adapter is merged into a copy of the model.

        Args:
            folder: Created if missing.
            state: Weights of the model inside the adapter's; by default it holds them itself.
        """
        if self.policy is None or not is_adapted(self.policy):
            return super().write_pretrained(folder, state)
        source = self.policy
        if state is not None:  # a sharded model cannot be copied
            source = self._new_policy()
            own = base_of(source).state_dict()
            base_of(source).load_state_dict({name: value for name, value in state.items() if name in own})
        merged_model(source).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
