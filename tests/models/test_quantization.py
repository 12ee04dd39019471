"""Bases in 8 and 4 bits: what is quantised, and the weights that it amounts to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_rlhf.models.head import vocabulary_head
from lit_rlhf.models.layouts import runs_layouts
from lit_rlhf.models.loading import load_causal_lm
from lit_rlhf.models.lora import add_lora
from lit_rlhf.models.quantization import dequantized_base, is_quantized
from tests.models.zoo import build

IDS = torch.tensor([[3, 4, 5, 6, 7]])
BOTH = pytest.mark.parametrize("kind", ["4bit", "8bit"])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(name: str) -> str:
        folder = tmp_path_factory.getbasetemp() / f"quantized-{name}"
        if not folder.exists():
            build(name).save_pretrained(folder)
        return str(folder)

    return make


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@BOTH
@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "gpt2", "gpt_neox", "qwen3", "mixtral", "gemma2-window-softcap"]
)
def test_the_whole_base_gives_the_quantised_ones_logits(folder_of, name, kind):
    model = load_causal_lm(folder_of(name), quantization=kind)
    assert is_quantized(model)
    adapted = add_lora(model, rank=2)
    before = {key: p.clone() for key, p in adapted.named_parameters()}
    whole = dequantized_base(adapted)
    assert not is_quantized(whole)
    assert {p.dtype for p in whole.parameters()} == {torch.float32}
    expected = logits(adapted)
    assert (logits(whole) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (logits(build(name)) - expected).abs().max() > 1e-3
    assert all(torch.equal(p, before[key]) for key, p in adapted.named_parameters())


@BOTH
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gpt_neox", "qwen3", "gemma2-window-softcap"])
def test_prompts_are_shared_and_the_head_stays_plain(folder_of, name, kind):
    model = add_lora(load_causal_lm(folder_of(name), quantization=kind), rank=2)
    assert runs_layouts(model)
    assert vocabulary_head(model) is not None


@BOTH
def test_evaluation_and_training_compute_the_same(folder_of, kind):
    """bitsandbytes has faster and rougher ways for evaluation on a CPU."""
    model = load_causal_lm(folder_of("llama"), quantization=kind)
    trained = logits(model.train())
    assert torch.equal(logits(model.eval()), trained)
    assert torch.equal(logits(model.train()), trained)


@BOTH
def test_a_row_does_not_depend_on_its_neighbours(folder_of, kind):
    """Not even where a neighbour has activations far out of the range."""
    model = load_causal_lm(folder_of("qwen3"), quantization=kind).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] *= 100
        alone = model(input_ids=IDS).logits
        together = model(input_ids=torch.cat([IDS, torch.full_like(IDS, 9)])).logits[:1]
    assert (together - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_an_exported_whole_base_loads_without_bitsandbytes(folder_of, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = load_causal_lm(folder_of("gpt2"), quantization="4bit")
    dequantized_base(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "quantization_config" not in loaded.config.to_dict()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)


def test_four_bits_take_a_seventh_of_the_memory(folder_of):
    """The projections of a tiny model are small beside its embeddings: they are counted alone."""
    model = load_causal_lm(folder_of("llama"), quantization="4bit")
    layers = [layer for layer in model.modules() if type(layer).__name__ == "Linear4bit"]
    packed = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    plain = sum(layer.in_features * layer.out_features * 4 for layer in layers)
    assert layers
    assert packed * 8 == plain
