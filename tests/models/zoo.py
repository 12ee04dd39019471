"""Tiny random models of many architectures."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 99
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Options of a tiny model's configuration, but for its vocabulary and its positions."""
_COMMON = {**TINY, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.25}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}

# Name of each model: its configuration's class, and what is special about it.
_SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral-window": ("MistralConfig", {"sliding_window": 4}),
    "gemma2-window-softcap": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "phi": ("PhiConfig", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "cohere": ("CohereConfig", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLmConfig", _NO_DROPOUT),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mamba": ("MambaConfig", {}),
}

SHARING = tuple(_SHARING)
"""Models whose completions can share their prompt's forward pass."""
ALONE = tuple(_ALONE)
"""Models that run every row on its own."""


def build(name: str) -> Any:
    """The model of a name, always with the same random weights, in eval mode.

    Args:
        name: Of :data:`SHARING` or :data:`ALONE`.
    """
    import transformers

    kind, special = {**_SHARING, **_ALONE}[name]
    config = getattr(transformers, kind)(**{**_COMMON, **special})
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()
