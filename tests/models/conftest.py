"""Two tiny models: absolute positions and rotary ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

VOCAB = 40


def _build(name: str) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    torch.manual_seed(1)
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    else:
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    config.initializer_range = 0.25
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def make_model() -> Callable[[str], Any]:
    return _build


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return _build(request.param)
