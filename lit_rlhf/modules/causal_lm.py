"""A causal language model under training: the policy of reinforcement learning, the pupil of supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.models.layouts import base_of
from lit_rlhf.models.loading import load_causal_lm
from lit_rlhf.models.lora import (
    POLICY_ADAPTER,
    add_lora,
    enable_gradient_checkpointing,
    is_adapted,
    load_adapter_weights,
    merged_model,
)
from lit_rlhf.models.lora_config import lora_options
from lit_rlhf.models.quantization import QUANTIZATIONS, Quantization, require_bitsandbytes
from lit_rlhf.modules.pretrained import DTYPES, PretrainedModule
from lit_rlhf.strategies import saves_shards, shards_weights


class CausalLMModule(PretrainedModule):
    """Builds the policy in ``configure_model``.

    Args:
        policy: Hub name or folder of the model to train. Its tokenizer comes from the same place.
        lr: Learning rate after warm-up.
        random_init: Take only the configuration from ``policy`` and train from new weights.
        lora_rank: Train a low-rank adapter of this rank on the frozen model; 0 trains all weights.
        lora_alpha: The adapter is scaled by ``lora_alpha / lora_rank``; twice the rank by default.
        lora_target_modules: Names of the adapted layers, or ``all-linear``.
        lora_config: Instead of the three: options of ``peft.LoraConfig`` by name (``r``, ``target_modules``,
            ``use_rslora``, ``use_dora``, ...), or the ``adapter_config.json`` that has them. ``lora_alpha`` and
            ``target_modules`` have the defaults above.
        adapter: Instead of a new adapter: the folder of a trained one, of which training goes on.
        quantization: Load the frozen model of an adapter in ``8bit`` or ``4bit`` (QLoRA) with bitsandbytes; ``dtype``
            is what is computed in.
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
        lora_config: dict[str, Any] | str | None = None,
        adapter: str | None = None,
        quantization: Quantization | None = None,
        **options: Any,
    ) -> None:
        super().__init__(policy, lr, **options)
        check_number("lora_rank", lora_rank, minimum=0)
        check_number("lora_alpha", lora_alpha, above=0)
        self.lora_rank = lora_rank
        self.lora_alpha = lora_alpha
        self.lora_target_modules = lora_target_modules
        self.lora_options: dict[str, Any] = {}
        self.adapter = adapter
        self._take_lora_config(lora_config)
        if self.lora_rank and random_init:
            raise ConfigurationError("an adapter is of a trained model: it cannot go with random_init")
        if quantization is not None:
            check_choice("quantization", quantization, QUANTIZATIONS)
            require_bitsandbytes(f"quantization: {quantization}")
            if not self.lora_rank:
                raise ConfigurationError(
                    f"quantization: {quantization} makes weights that cannot be trained: train an adapter on them "
                    "(lora_rank, lora_config or adapter)"
                )
        self.random_init = random_init
        self.quantization = quantization
        self.policy: nn.Module | None = None
        self.register_load_state_dict_post_hook(_forget_missing_base)

    def _take_lora_config(self, lora_config: dict[str, Any] | str | None) -> None:
        """Where a file or a folder says what the adapter is, the options have its values from here on."""
        source = self.adapter if lora_config is None else lora_config
        if source is None:
            return
        name = "adapter" if lora_config is None else "lora_config"
        clashes = {
            "lora_rank": self.lora_rank != 0,
            "lora_alpha": self.lora_alpha is not None,
            "lora_target_modules": self.lora_target_modules != "all-linear",
            "adapter": lora_config is not None and self.adapter is not None,
        }
        if any(clashes.values()):
            others = ", ".join(other for other, clash in clashes.items() if clash)
            raise ConfigurationError(f"{name} says what the adapter is: leave {others} out")
        found = lora_options(source)
        self.lora_rank = found.pop("r")
        self.lora_alpha = found.pop("lora_alpha", None)
        self.lora_target_modules = found.pop("target_modules", "all-linear")
        self.lora_options = found

    @property
    def trained_model(self) -> nn.Module | None:
        """The policy."""
        return self.policy

    def check_devices(self) -> None:
        """Refuse what cannot hold a quantised model, too."""
        super().check_devices()
        if self.quantization is not None and shards_weights(self.trainer):
            raise ConfigurationError(
                f"quantization: {self.quantization} cannot go with {type(self.trainer.strategy).__name__}: "
                "bitsandbytes' weights cannot be sharded. Use ddp, where each device holds them all, or leave "
                "quantization out"
            )

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
            quantization=self.quantization,
            device=None if self._trainer is None else self.trainer.strategy.root_device,
        )
        if self.gradient_checkpointing:
            enable_gradient_checkpointing(policy)
        if self.lora_rank:
            policy = self.add_adapter(policy, POLICY_ADAPTER, self.adapter)
        return policy

    def add_adapter(self, policy: nn.Module, name: str, folder: str | None = None) -> nn.Module:
        """Add a trainable adapter of the kind that the options describe.

        Args:
            policy: A Hugging Face model, or a peft model that gets a further adapter.
            name: Of the adapter.
            folder: Of a trained adapter that it starts as; by default it starts from nothing.

        Returns:
            A peft model.
        """
        adapted = add_lora(policy, self.lora_rank, self.lora_alpha, self.lora_target_modules, name, **self.lora_options)
        if folder is not None:
            load_adapter_weights(adapted, folder, name)
        return adapted

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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out what an adapter does not train: it is loaded from where it came from."""
        if self.policy is None or not self.lora_rank or saves_shards(self._trainer):
            return
        trained = _trained_keys(self.policy)
        checkpoint["state_dict"] = {
            name: value
            for name, value in checkpoint["state_dict"].items()
            if name in trained or not name.startswith("policy.")
        }


def _trained_keys(policy: nn.Module) -> set[str]:
    """Names of the policy's trained weights in a checkpoint."""
    return {f"policy.{name}" for name, parameter in policy.named_parameters() if parameter.requires_grad}


def _forget_missing_base(module: nn.Module, incompatible_keys: Any) -> None:
    """Post-hook of ``load_state_dict``: with an adapter the frozen base is not part of a checkpoint."""
    policy = getattr(module, "policy", None)
    if policy is None or not getattr(module, "lora_rank", 0):
        return
    trained = _trained_keys(policy)
    incompatible_keys.missing_keys[:] = [
        key for key in incompatible_keys.missing_keys if key in trained or not key.startswith("policy.")
    ]
