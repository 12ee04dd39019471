"""Tiny policies of many architectures, a scripted policy and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.zoo import TINY

VOCAB = 48
SPECIALS = ["<pad>", "<s>", "</s>"]
SHARED = {**TINY, "vocab_size": VOCAB, "max_position_embeddings": 96}
GEMMA = {**SHARED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}


def _configs() -> dict[str, Any]:
    from transformers import (
        Gemma2Config,
        Gemma3TextConfig,
        GPT2Config,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
    )

    mixed = ["sliding_attention", "full_attention"]
    return {
        "llama": LlamaConfig(**SHARED, tie_word_embeddings=False),
        "llama-tied": LlamaConfig(**SHARED, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**SHARED, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**SHARED, head_dim=8, tie_word_embeddings=False),
        "gemma2": Gemma2Config(
            **GEMMA,
            layer_types=mixed,
            tie_word_embeddings=False,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=6.0,
            attn_implementation="eager",
        ),
        "gemma3": Gemma3TextConfig(**GEMMA, layer_types=mixed, tie_word_embeddings=False),
        "gpt2": GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=96,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "mistral": MistralConfig(**SHARED, sliding_window=8, tie_word_embeddings=False),
    }


def _build(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(name))
    config = _configs()[name]
    config.initializer_range = 0.25
    model = AutoModelForCausalLM.from_config(config)
    if name == "gpt2":
        model.transformer.wpe.weight.data.mul_(3)
    return model.eval()


@pytest.fixture(scope="session")
def make_policy() -> Callable[[str], Any]:
    """Build a tiny random policy with peaked distributions by name."""
    return _build


@pytest.fixture(
    scope="session", params=["llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "mistral"]
)
def policy(request: pytest.FixtureRequest) -> Any:
    """One policy of each architecture."""
    return _build(request.param)


@pytest.fixture(scope="session")
def llama() -> Any:
    return _build("llama")


class ScriptedPolicy(nn.Module):
    """Continues each known prompt with its script; it knows a row's history only from the cache it is handed."""

    LOGIT = 3.0

    def __init__(self, scripts: Mapping[Sequence[int], Sequence[int]], vocab_size: int) -> None:
        from transformers import LlamaConfig

        super().__init__()
        self.config = LlamaConfig(num_hidden_layers=1, vocab_size=vocab_size)
        self.scripts = {tuple(prompt): list(script) for prompt, script in scripts.items()}
        self.anchor = nn.Parameter(torch.zeros(()))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Any, use_cache: bool
    ) -> SimpleNamespace:
        states = input_ids[:, None, :, None].double()
        history = past_key_values.update(states, states, 0)[0][:, 0, :, 0].long()
        logits = torch.zeros(len(input_ids), 1, self.config.vocab_size)
        for row, (ids, mask) in enumerate(zip(history, attention_mask.bool(), strict=True)):
            real = ids[mask].tolist()
            assert int(position_ids[row, -1]) == len(real) - 1
            logits[row, 0, self._next(real)] = self.LOGIT
        return SimpleNamespace(logits=logits)

    def _next(self, real: list[int]) -> int:
        for prompt, script in self.scripts.items():
            said = real[len(prompt) :]
            if real[: len(prompt)] == list(prompt) and len(said) < len(script):
                # A row that has ended is decoded along until it is dropped; nobody reads what comes then.
                return script[len(said)]
        return 0


@pytest.fixture(scope="session")
def scripted_policy() -> Callable[..., ScriptedPolicy]:
    def make(scripts: Mapping[Sequence[int], Sequence[int]], vocab_size: int = VOCAB) -> ScriptedPolicy:
        return ScriptedPolicy(scripts, vocab_size)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level BPE with three merges: ``aa``, ``</`` and ``>.``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "aa", "</", ">."]
    merges = [("a", "a"), ("<", "/"), (">", ".")]
    inner = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
