"""Sequence classifiers as reward models: how one is loaded, and where in a text its score is read."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.loading import first_line, load_config, switch_off_dropout
from lit_rlhf.models.quantization import Quantization, quantization_options, steady

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Heads that stay in full precision: they are small, and each score goes through them.
_HEADS = ["score", "classifier", "classification_head", "lm_head"]


def load_sequence_classifier(
    name_or_path: str,
    *,
    num_labels: int | None = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    quantization: Quantization | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a sequence classifier without dropout, in evaluation mode.

    Args:
        name_or_path: Hub name or folder.
        num_labels: Outputs of the head, which gets random weights where the checkpoint has no such head; by default
            the head must be the checkpoint's own.
        dtype: Type of the weights; with ``quantization`` the type that is computed in.
        attn_implementation: Attention of ``transformers``; its own choice by default.
        quantization: Load the linear layers in 8 or 4 (NF4) bits with bitsandbytes, all but the head.
        device: Where a quantized model is put while it is loaded.

    Raises:
        ConfigurationError: No sequence classifier can be loaded from there, or it is an encoder-decoder.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification

    config = load_config(name_or_path)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(f"{name_or_path!r} is an encoder-decoder; a decoder or an encoder is wanted")
    if num_labels is not None:
        is_classifier = any("SequenceClassification" in name for name in config.architectures or ())
        if is_classifier and len(config.id2label or {}) != num_labels:
            raise ConfigurationError(f"{name_or_path!r} is a classifier with other than {num_labels} outputs")
        config.num_labels = num_labels
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if quantization is not None:
        options.update(quantization_options(quantization, dtype, device, keep=_HEADS))
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name_or_path, config=config, output_loading_info=True, **options
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ConfigurationError(
            f"Cannot load a sequence classifier from {name_or_path!r}. transformers says: {first_line(error)}"
        ) from error
    if num_labels is None and info["missing_keys"]:
        raise ConfigurationError(
            f"{name_or_path!r} is no trained sequence classifier: it lacks {', '.join(sorted(info['missing_keys']))}"
        )
    steady(model)
    switch_off_dropout(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # It would stop the gradient of the end-of-sequence token's embedding where that token pads as well.
            module.padding_idx = None
    return model.eval()


def sequence_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Outputs of a sequence classifier's head for each row.

    A decoder's score is read at the last token that the attention mask counts. The models' own ``forward`` looks for
    the last id that differs from the configuration's padding id, and so skips an end-of-sequence token that also pads.

    Args:
        model: A Hugging Face sequence classifier: a decoder with a ``score`` head, or an encoder.
        input_ids: ``(N, L)``, padded on the right with any id.
        attention_mask: ``(N, L)`` bool, True = a real token; at least one in each row.

    Returns:
        ``(N, num_labels)`` float32.
    """
    head, backbone = getattr(model, "score", None), getattr(model, "base_model", None)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    if head is None or backbone is None or backbone is model:
        return model(**inputs).logits.float()
    if "use_cache" in inspect.signature(backbone.forward).parameters:
        inputs["use_cache"] = False
    hidden = backbone(**inputs).last_hidden_state
    last = attention_mask.long().sum(dim=1) - 1
    return head(hidden[torch.arange(len(last), device=last.device), last]).float()
