"""Load causal language models and tokenizers the way on-policy training needs them.

``transformers`` is imported inside the functions: ``import lit_rlhf`` stays light.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.quantization import Quantization, quantization_options, steady

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Dropout and layer dropout by all their names, and the noise that mixtures of experts add to their router's input.
_NOISE_WORDS = ("drop", "jitter")

# Values with which an option of a generation config changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_k": (0, 50),  # 50 is the default of transformers, written into many files
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "suppress_tokens": ([],),
    "bad_words_ids": ([],),
}


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer by hub name or from a local folder.

    Args:
        name_or_path: Hub name or folder.

    Raises:
        ConfigurationError: No tokenizer can be loaded from there.
    """
    from transformers import AutoTokenizer

    _refuse_adapter(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_not_found("tokenizer", name_or_path, error)) from error


def load_config(name_or_path: str) -> PretrainedConfig:
    """Load a model's configuration with every dropout rate (and router noise) set to zero.

    They must be off in each of the passes whose log-probs are compared; a rate of zero holds in train mode too,
    where gradient checkpointing needs the model to be.

    Args:
        name_or_path: Hub name or folder.

    Raises:
        ConfigurationError: No configuration can be loaded from there.
    """
    from transformers import AutoConfig

    _refuse_adapter(name_or_path)
    try:
        config = AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_not_found("model", name_or_path, error)) from error
    _without_noise(config)
    return config


def load_causal_lm(
    name_or_path: str,
    *,
    dtype: torch.dtype = torch.float32,
    random_init: bool = False,
    attn_implementation: str | None = None,
    quantization: Quantization | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal language model without dropout, in train mode.

    Args:
        name_or_path: Hub name or folder.
        dtype: Type of the weights. Keep ``float32`` unless memory forbids it: small steps are lost in ``bfloat16``.
        random_init: Take only the configuration and draw new weights (for training from scratch).
        attn_implementation: Attention of ``transformers`` (``"sdpa"``, ``"eager"``, ...); its own choice by default.
        quantization: Load the linear layers in ``8bit`` or ``4bit``, all but the vocabulary head; they cannot be
            trained.
        device: Where a quantised model is put while it is loaded; any other stays on the CPU.

    Raises:
        ConfigurationError: No causal language model can be loaded from there.
    """
    from transformers import AutoModelForCausalLM

    extra = {} if quantization is None else quantization_options(quantization, dtype, device)
    model = _load_trainable(
        AutoModelForCausalLM, "causal language model", name_or_path, dtype, attn_implementation, random_init, **extra
    )
    steady(model)
    return model


def load_backbone(
    name_or_path: str, *, dtype: torch.dtype = torch.float32, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Load a model without its language-model head, without dropout, in train mode.

    Args:
        name_or_path: Hub name or folder; a causal language model's is fine.
        dtype: Type of the weights.
        attn_implementation: Attention of ``transformers``; its own choice by default.

    Raises:
        ConfigurationError: No model can be loaded from there.
    """
    from transformers import AutoModel

    return _load_trainable(AutoModel, "model", name_or_path, dtype, attn_implementation)


def _load_trainable(
    auto_class: Any,
    what: str,
    name_or_path: str,
    dtype: torch.dtype,
    attn_implementation: str | None,
    random_init: bool = False,
    **options: Any,
) -> PreTrainedModel:
    from safetensors import SafetensorError

    config = load_config(name_or_path)
    options["dtype"] = dtype
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        if random_init:
            model = auto_class.from_config(config, **options)
        else:
            model = auto_class.from_pretrained(name_or_path, config=config, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ConfigurationError(_not_found(what, name_or_path, error)) from error
    switch_off_dropout(model)
    # Hugging Face models load in eval mode, where gradient checkpointing is off and Lightning warns.
    return model.train()


def switch_off_dropout(model: nn.Module) -> None:
    """Set the rate of every dropout layer to 0, whatever its configuration says.

    Args:
        model: Changed in place.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def first_line(error: Exception) -> str:
    """What an error of another library says, to be quoted in one line; its type where it says nothing.

    Args:
        error: Of any type.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" :")


def eos_token_ids(
    name_or_path: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's, the model config's and the tokenizer's.

    Nothing else is taken from the checkpoint's generation config; see :func:`ignored_generation_options`.

    Args:
        name_or_path: Hub name or folder of the model.
        config: The model's configuration.
        tokenizer: The tokenizer that goes with it, if any.
    """
    found = getattr(_generation_config(name_or_path), "eos_token_id", None)
    ids: set[int] = set()
    for value in (found, getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return tuple(sorted(ids))


def ignored_generation_options(name_or_path: str) -> dict[str, Any]:
    """What the checkpoint's generation config asks for that changes which tokens are sampled, and is not followed.

    Args:
        name_or_path: Hub name or folder of the model.
    """
    config = _generation_config(name_or_path)
    given = {name: getattr(config, name, None) for name in _NEUTRAL}
    return {name: value for name, value in given.items() if value is not None and value not in _NEUTRAL[name]}


def _generation_config(name_or_path: str) -> GenerationConfig | None:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(name_or_path)
    except OSError:
        return None


def context_length(config: PretrainedConfig) -> int | None:
    """Longest sequence (prompt plus completion) the model was built for, in tokens; ``None`` where it says nothing."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        value = getattr(config.get_text_config(), name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _without_noise(config: PretrainedConfig) -> None:
    """Set the rates of this configuration and of those nested in it to zero, in place."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _without_noise(value)
        elif isinstance(value, float) and any(word in name for word in _NOISE_WORDS):
            setattr(config, name, 0.0)


def _refuse_adapter(name_or_path: str) -> None:
    folder = Path(name_or_path)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ConfigurationError(
            f"{name_or_path!r} holds a low-rank adapter, not a model: merge it into its base first "
            "(peft: PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)), or train "
            "on from it: its base in `policy`, this folder in `adapter`"
        )


def _not_found(what: str, name_or_path: str, error: Exception) -> str:
    hint = "the folder exists" if Path(name_or_path).is_dir() else "no such folder here"
    return f"Cannot load a {what} from {name_or_path!r} ({hint}). transformers says: {first_line(error)}"
