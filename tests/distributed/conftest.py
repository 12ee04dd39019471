from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

QUICKSTART_MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama with grouped-query heads and the character tokenizer of the quickstart."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART_MODEL)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Prompts of unequal length."""
    pairs = [(1, 2), (30, 4), (12, 345), (7, 7), (99, 1), (5, 60)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs inside groups from the first rollout on."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


@pytest.fixture
def digits() -> Callable[..., list[float]]:
    return share_of_digits


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    def make(**options: Any) -> L.Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
        }
        return L.Trainer(**{**defaults, **options})

    return make
