"""What every module that trains a pretrained model shares: optimizer, gradient norms, default callbacks, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_rlhf.callbacks.export_policy import ExportPolicy
from lit_rlhf.callbacks.graceful_stop import GracefulStop
from lit_rlhf.callbacks.resume_guard import ResumeGuard
from lit_rlhf.callbacks.warmup_cosine import WarmupCosine
from lit_rlhf.checkpointing import atomic_folder
from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.models.forward import prepare_for_passes
from lit_rlhf.models.layouts import base_of
from lit_rlhf.models.loading import load_config, load_tokenizer
from lit_rlhf.modules.optimizers import OPTIMIZERS, OptimizerName, check_optimizer, make_optimizer
from lit_rlhf.strategies import check_mesh, check_strategy, shard_module, shards_weights, whole, whole_state_dict

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PretrainedModule(L.LightningModule):
    """A Hugging Face model under training, built in ``configure_model``.

    Args:
        model_name: Hub name or folder of the model. Its tokenizer comes from the same place.
        lr: Learning rate after warm-up.
        optimizer: ``adamw``; ``adamw_8bit``, whose moments take a quarter of the memory (bitsandbytes); or
            ``paged_adamw_8bit``, which also moves them to the host while a GPU's memory is full.
        weight_decay: AdamW's decoupled weight decay.
        betas: AdamW's moments.
        max_grad_norm: Gradients are scaled down to this norm, unless the Trainer's ``gradient_clip_val`` says another;
            ``None`` switches it off.
        warmup_ratio: Share of all optimizer steps during which the learning rate rises; a cosine follows.
        dtype: Type of the weights: ``float32``, ``bfloat16`` or ``float16``.
        attn_implementation: Attention of transformers, for instance ``sdpa`` or ``eager``; its own choice by default.
        gradient_checkpointing: Recompute activations in the backward pass: less memory, about a third more time.
    """

    def __init__(
        self,
        model_name: str,
        lr: float,
        optimizer: OptimizerName = "adamw",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float | None = 1.0,
        warmup_ratio: float = 0.03,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_choice("dtype", dtype, tuple(DTYPES))
        check_choice("optimizer", optimizer, OPTIMIZERS)
        check_number("lr", lr, above=0)
        check_number("weight_decay", weight_decay, minimum=0)
        check_number("max_grad_norm", max_grad_norm, above=0)
        check_number("warmup_ratio", warmup_ratio, minimum=0, maximum=1)
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_number(name, beta, minimum=0, below=1)
        self.model_name = str(model_name)
        self.lr = lr
        self.optimizer_name = optimizer
        self.weight_decay = weight_decay
        self.betas = betas
        self.max_grad_norm = max_grad_norm
        self.warmup_ratio = warmup_ratio
        self.dtype_name = dtype
        self.attn_implementation = attn_implementation
        self.gradient_checkpointing = gradient_checkpointing
        self.grad_norms: dict[str, Tensor] = {}
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._config: PretrainedConfig | None = None

    @property
    def trained_model(self) -> nn.Module | None:
        """The Hugging Face model under training; ``None`` until it is built."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded on first use (before any weights)."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model_name)
        return self._tokenizer

    @property
    def model_config(self) -> PretrainedConfig:
        """The model's Hugging Face configuration, loaded on first use (before any weights)."""
        if self._config is None:
            self._config = load_config(self.model_name)
        return self._config

    def configure_model(self) -> None:
        """Build the models, once, and shard them where the strategy does."""
        if self._trainer is not None:
            self.check_devices()
        self.build_models()
        if shards_weights(self._trainer):
            assert self.device_mesh is not None
            for model in self.models():
                prepare_for_passes(model)  # while its weights are whole
                shard_module(base_of(model), self.device_mesh["data_parallel"])
            # A sharded checkpoint is compared with every weight there is, those that are never saved among them.
            self.strict_loading = False

    def check_devices(self) -> None:
        """Refuse what the Trainer's devices and strategy cannot do, before a model is loaded."""
        check_strategy(self.trainer)
        if shards_weights(self.trainer):
            check_mesh(self.trainer)
        if self.is_fitting:
            check_optimizer(self.optimizer_name, self.trainer.strategy.root_device, shards_weights(self.trainer))

    def build_models(self) -> None:
        """Build what is not built yet: Lightning asks before each of fit, validate, test and predict."""
        raise NotImplementedError

    def models(self) -> list[nn.Module]:
        """Every model and head with weights; no weight is in two of them."""
        return [] if self.trained_model is None else [self.trained_model]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer over named parameter groups; callbacks and LearningRateMonitor know them by name."""
        return make_optimizer(
            self.optimizer_name,
            self.parameter_groups(),
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            fused=self._may_fuse(),  # one pass over the weights instead of a dozen
        )

    def _may_fuse(self) -> bool:
        """A fused optimizer unscales gradients itself, too late to clip them; Lightning clips no values for it."""
        trainer = self._trainer
        scales = getattr(getattr(trainer, "precision_plugin", None), "scaler", None) is not None
        return trainer is not None and not scales and trainer.gradient_clip_algorithm != "value"

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters of each named group, with the group's own learning rate and gradient-norm limit."""
        assert self.trained_model is not None
        return [parameter_group("policy", self.trained_model.parameters(), self.lr, self.max_grad_norm)]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each parameter group to its own norm, or to the Trainer's ``gradient_clip_val``; keep the norms."""
        self.grad_norms = {}
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            self.grad_norms[group.get("name", "policy")] = whole(norm)
            own_limit = group.get("max_grad_norm", self.max_grad_norm)
            limit = own_limit if gradient_clip_val is None else float(gradient_clip_val)
            if limit and gradient_clip_algorithm != "value":
                nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        if gradient_clip_val is not None and gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_callbacks(self) -> list[L.Callback]:
        """What every run of fit wants, unless the Trainer has one of its own."""
        return self.unless_present(
            [WarmupCosine(warmup_ratio=self.warmup_ratio), ExportPolicy(), ResumeGuard(), GracefulStop()]
        )

    def unless_present(self, defaults: Sequence[L.Callback]) -> list[L.Callback]:
        """Those of the default callbacks whose like the Trainer does not have.

        Args:
            defaults: One of each kind.
        """
        present = self.trainer.callbacks  # type: ignore[attr-defined]
        return [default for default in defaults if not any(isinstance(own, type(default)) for own in present)]

    @property
    def is_fitting(self) -> bool:
        """Whether this is a run of ``fit``; False without a Trainer."""
        return self._trainer is not None and self._trainer.state.fn == "fit"

    def save_pretrained(self, directory: str | Path) -> Path:
        """Write the model and its tokenizer as a Hugging Face folder that plain ``transformers`` loads.

        Every rank has to call it where the model is sharded; the first one writes.

        Args:
            directory: Created if missing.

        Returns:
            The folder.
        """
        if self.trained_model is None:
            raise ConfigurationError("save_pretrained: the model is not built yet; call fit or configure_model first")
        state = whole_state_dict(base_of(self.trained_model))
        if self.global_rank == 0:
            with atomic_folder(directory) as folder:
                self.write_pretrained(folder, state)
        return Path(directory)

    def write_pretrained(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        """Write model and tokenizer.

        Args:
            folder: Created if missing.
            state: Weights of the Hugging Face model; by default it holds them itself.
        """
        self.trained_model.save_pretrained(folder, state_dict=state)  # type: ignore[operator, union-attr]
        self.tokenizer.save_pretrained(folder)


def parameter_group(name: str, parameters: Any, lr: float, max_grad_norm: float | None) -> dict[str, Any]:
    """A named group of an optimizer, of the parameters that are trained.

    Args:
        name: Shown by LearningRateMonitor.
        parameters: Trainable and frozen ones.
        lr: The group's learning rate.
        max_grad_norm: The group's gradient-norm limit; ``None`` is none.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return {"name": name, "params": trained, "lr": lr, "max_grad_norm": max_grad_norm}
