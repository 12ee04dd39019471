"""What can be refused before a model is loaded: each message names the option and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lit_rlhf.engines.base import AheadEngine
from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    import lightning as L

    from lit_rlhf.data.prompts import PromptDataset
    from lit_rlhf.rollout.datamodule import RolloutDataModule


def check_options(data: RolloutDataModule) -> None:
    """Check the constructor's values against each other.

    Args:
        data: With its options set.

    Raises:
        ConfigurationError: Naming the option and what is allowed.
    """
    counts = ("prompts_per_iteration", "group_size", "passes", "steps_per_pass")
    optional_counts = ("micro_batch_size", "micro_batch_tokens", "max_prompt_length", "val_batch_size")
    for name in counts + optional_counts:
        value = getattr(data, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    if data.sampling.temperature == 0:
        raise ConfigurationError(
            "temperature 0 is greedy: all completions of a prompt are the same and there is nothing to learn; "
            "use a positive temperature (0.7 to 1.0 is usual)"
        )
    if data.micro_batch_size is not None and data.micro_batch_tokens is not None:
        raise ConfigurationError("give micro_batch_size or micro_batch_tokens, not both")
    if data.steps_per_pass > data.prompts_per_iteration:
        raise ConfigurationError(
            f"steps_per_pass={data.steps_per_pass} optimizer steps cannot share "
            f"prompts_per_iteration={data.prompts_per_iteration} prompts; at most one step per prompt"
        )
    if data.staleness not in (0, 1):
        raise ConfigurationError(f"staleness must be 0 or 1, got {data.staleness}")
    if data.staleness and not isinstance(data.engine, AheadEngine):
        raise ConfigurationError(
            f"staleness: 1 samples while the policy learns, but {type(data.engine).__name__} samples on the policy's "
            "own devices: use lit_rlhf.engines.VLLMServers, or leave staleness out"
        )
    if data.seed is not None and data.seed < 0:
        raise ConfigurationError(f"seed must be 0 or positive, got {data.seed}")
    if data.val_temperature < 0:
        raise ConfigurationError(f"val_temperature must be 0 (greedy) or positive, got {data.val_temperature}")
    if data.val_samples < 0:
        raise ConfigurationError(f"val_samples must be 0 (greedy only) or positive, got {data.val_samples}")
    if data.val_confidence is not None and not 0 < data.val_confidence < 1:
        raise ConfigurationError(
            f"val_confidence must lie between 0 and 1, such as 0.95 (null for no intervals), got {data.val_confidence}"
        )
    if data.val_ratings is not None and data.sources["val"] is None:
        raise ConfigurationError("val_ratings are ratings of completions of val: set RolloutDataModule(val=...) too")
    for k in data.pass_k:
        if not 1 <= k <= data.val_samples:
            raise ConfigurationError(f"pass_k={k} needs at least {max(k, 1)} val_samples, got {data.val_samples}")


def check_trainer(data: RolloutDataModule, trainer: L.Trainer) -> int | None:
    """Set what on-policy training needs of the Trainer, refuse what contradicts it.

    Args:
        data: The DataModule.
        trainer: At the start of fit.

    Returns:
        Micro-batches per step if the Trainer's ``accumulate_grad_batches`` asks for a number, else ``None``.

    Raises:
        ConfigurationError: Naming the option and the line to write.
    """
    module = trainer.lightning_module
    if not hasattr(module, "score_rollout"):
        raise ConfigurationError(
            f"RolloutDataModule makes rollouts for PPOModule and GRPOModule; {type(module).__name__} learns from "
            "another one (SFTModule: SupervisedDataModule, RewardModelModule: PreferenceDataModule)"
        )
    if data.staleness and module.sampling_correction == "off":
        raise ConfigurationError(
            "staleness: 1 learns from what older weights have sampled, which only sampling_correction makes up for: "
            "set the module's sampling_correction to token_truncate (or another one of docs/variants.md)"
        )
    if data.sources["train"] is None:
        raise ConfigurationError("fit needs training prompts: set RolloutDataModule(train=...)")
    if trainer.precision in ("bf16-true", "16-true", "64-true", "transformer-engine"):
        raise ConfigurationError(
            f"precision={trainer.precision} converts what sampler and trainer must share: set the module's dtype "
            "instead and leave the Trainer's precision at 32-true, or use bf16-mixed"
        )
    every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if every not in (0, 1):
        raise ConfigurationError(
            f"reload_dataloaders_every_n_epochs={every} would train on stale rollouts: "
            "write Trainer(reload_dataloaders_every_n_epochs=1) or leave it out"
        )
    # Without this Lightning would train on the first rollout for ever.
    trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    if not (isinstance(limit, float) and limit == 1.0) and limit != 0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"limit_train_batches={limit} would throw away part of every rollout; "
            "lower prompts_per_iteration or max_epochs instead"
        )
    clip = trainer.gradient_clip_val
    if clip is not None and clip < 0:
        raise ConfigurationError(f"gradient_clip_val must be 0 (off) or positive, got {clip}")
    steps = data.optimizer_steps_per_iteration
    if trainer.max_steps > 0 and trainer.max_steps % steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"max_steps={trainer.max_steps} would end inside an iteration of {steps} optimizer steps "
            f"(passes x steps_per_pass): use a multiple of {steps}, or max_epochs"
        )
    if any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigurationError(
            "GradientAccumulationScheduler cannot go with rollouts, which are cut into micro-batches anew in each "
            "iteration: use micro_batch_size, micro_batch_tokens or accumulate_grad_batches"
        )
    for callback in trainer.checkpoint_callbacks:
        every = getattr(callback, "_every_n_train_steps", 0)
        if every and every % steps:
            raise ConfigurationError(
                f"ModelCheckpoint(every_n_train_steps={every}) would save in the middle of an iteration of {steps} "
                f"optimizer steps, which would not resume exactly: use every_n_epochs or a multiple of {steps}"
            )
    asked = trainer.accumulate_grad_batches
    if asked == 1:
        return None
    if data.micro_batch_size is not None or data.micro_batch_tokens is not None:
        raise ConfigurationError(
            f"accumulate_grad_batches={asked} cuts each optimizer step into {asked} micro-batches; "
            "give either it or micro_batch_size / micro_batch_tokens"
        )
    return asked


def check_lengths(prompts: PromptDataset | None, split: str, max_new_tokens: int, context: int | None) -> None:
    """Prompt and completion must fit into the model's context.

    Args:
        prompts: Loaded prompts; ``None`` if the split has no source.
        split: ``train``, ``val`` or ``test``.
        max_new_tokens: Longest completion.
        context: Longest sequence of the model, if it says so.

    Raises:
        ConfigurationError: Naming both lengths, or the option that names the prompts.
    """
    if prompts is None:
        raise ConfigurationError(f"there are no prompts for this: set RolloutDataModule({split}=...)")
    longest = prompts.longest
    if context is not None and longest + max_new_tokens > context:
        raise ConfigurationError(
            f"{prompts.name}: the longest prompt has {longest} tokens; with max_new_tokens={max_new_tokens} that is "
            f"{longest + max_new_tokens}, more than the model's context of {context}. "
            "Lower max_new_tokens or set max_prompt_length"
        )
