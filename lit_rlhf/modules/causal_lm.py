"""What every module that trains a causal language model shares: loading, optimizer, gradient norm, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_rlhf.callbacks.export_policy import ExportPolicy
from lit_rlhf.callbacks.warmup_cosine import WarmupCosine
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.loading import load_causal_lm, load_config, load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CausalLMModule(L.LightningModule):
    """A Hugging Face causal language model under training, built in ``configure_model``.

    Args:
        policy: Hub name or folder of the model to train. Its tokenizer comes from the same place.
        lr: Learning rate after warm-up.
        weight_decay: AdamW's decoupled weight decay.
        betas: AdamW's moments.
        max_grad_norm: Gradients are scaled down to this norm, unless the Trainer's ``gradient_clip_val`` says another;
            ``None`` switches it off.
        warmup_ratio: Share of all optimizer steps during which the learning rate rises; a cosine follows.
        dtype: Type of the weights: ``float32``, ``bfloat16`` or ``float16``.
        random_init: Take only the configuration from ``policy`` and train from new weights.
        attn_implementation: Attention of transformers, for instance ``sdpa`` or ``eager``; its own choice by default.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
    """

    def __init__(
        self,
        policy: str,
        lr: float = 2e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float | None = 1.0,
        warmup_ratio: float = 0.03,
        dtype: str = "float32",
        random_init: bool = False,
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if not lr > 0:
            raise ConfigurationError(f"lr must be positive, got {lr}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigurationError(f"max_grad_norm must be positive or null, got {max_grad_norm}")
        if not 0.0 <= warmup_ratio <= 1.0:
            raise ConfigurationError(f"warmup_ratio must lie in [0, 1], got {warmup_ratio}")
        self.policy_name = str(policy)
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.max_grad_norm = max_grad_norm
        self.warmup_ratio = warmup_ratio
        self.dtype_name = dtype
        self.random_init = random_init
        self.attn_implementation = attn_implementation
        self.gradient_checkpointing = gradient_checkpointing
        self.policy: nn.Module | None = None
        self.grad_norm: Tensor | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._config: PretrainedConfig | None = None

    def configure_model(self) -> None:
        """Build the policy, once; Lightning calls this at the start of fit, validate, test and predict."""
        if self.policy is not None:
            return
        self.policy = load_causal_lm(
            self.policy_name,
            dtype=DTYPES[self.dtype_name],
            random_init=self.random_init,
            attn_implementation=self.attn_implementation,
        )
        if self.gradient_checkpointing:
            self.policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer, loaded on first use (before any weights)."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy_name)
        return self._tokenizer

    @property
    def policy_config(self) -> PretrainedConfig:
        """The policy's Hugging Face configuration, loaded on first use (before any weights)."""
        if self._config is None:
            self._config = load_config(self.policy_name)
        return self._config

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One AdamW over named parameter groups; callbacks and LearningRateMonitor know them by name."""
        return torch.optim.AdamW(self.parameter_groups(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters of each named group, with the group's own learning rate."""
        assert self.policy is not None
        return [{"name": "policy", "params": [p for p in self.policy.parameters() if p.requires_grad], "lr": self.lr}]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip to the Trainer's ``gradient_clip_val`` if given, else to ``max_grad_norm``; keep the norm."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            self.grad_norm = None
            return
        self.grad_norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if gradient_clip_val is not None and gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        limit = self.max_grad_norm if gradient_clip_val is None else float(gradient_clip_val)
        if limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, self.grad_norm)

    def configure_callbacks(self) -> list[L.Callback]:
        """Warm-up/cosine and the export at the end of fit, unless the Trainer already has such a callback."""
        defaults: list[L.Callback] = [WarmupCosine(warmup_ratio=self.warmup_ratio), ExportPolicy()]
        present = {type(callback) for callback in self.trainer.callbacks}  # type: ignore[attr-defined]
        return [callback for callback in defaults if type(callback) not in present]

    def save_pretrained(self, directory: str | Path) -> Path:
        """Write the policy and its tokenizer as a Hugging Face folder that plain ``transformers`` loads.

        Args:
            directory: Created if missing.

        Returns:
            The folder.
        """
        if self.policy is None:
            raise ConfigurationError("save_pretrained: the policy is not built yet; call fit or configure_model first")
        folder = Path(directory)
        self.policy.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        return folder
