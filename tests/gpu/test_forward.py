"""Attention layouts, the vocabulary head and sampling on a CUDA device against the same numbers from the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine, transformers
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.functional.vocabulary import hidden_log_probs
from lit_rlhf.models.completions import Completions
from lit_rlhf.models.forward import completion_outputs
from lit_rlhf.models.layouts import runs_layouts
from tests.models.zoo import VOCAB, build

pytestmark = pytest.mark.gpu

MODELS = ["llama", "gpt2", "qwen3", "mistral-window", "gemma2-window-softcap"]


def rows(device: torch.device | str) -> Completions:
    """Three prompts of unequal length with 3, 1 and 2 completions."""
    generator = torch.Generator().manual_seed(2)
    prompt_lengths = torch.tensor([4, 4, 4, 9, 2, 2])
    lengths = torch.tensor([5, 1, 7, 3, 6, 2])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    prompts = torch.randint(3, VOCAB, (3, 9), generator=generator)[groups]
    completions = torch.randint(3, VOCAB, (6, 7), generator=generator)
    return Completions(*(t.to(device) for t in (prompts, prompt_lengths, completions, lengths, groups)))


def log_probs_and_gradients(model: Any, device: torch.device | str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = copy.deepcopy(model).to(device)
    assert runs_layouts(model)
    outputs = completion_outputs(model, rows(device), temperature=0.7, entropy="train")
    loss = outputs.log_probs.square().sum() + outputs.entropy.sum()
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return outputs.log_probs.detach().cpu(), [gradient.cpu() for gradient in gradients]


@pytest.mark.parametrize("name", MODELS)
def test_packed_groups(cuda, name):
    model = build(name)
    expected, expected_gradients = log_probs_and_gradients(model, "cpu")
    actual, gradients = log_probs_and_gradients(model, cuda)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert (gradient - wanted).norm() <= 1e-3 * wanted.norm() + 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_sampling_with_shared_prompts(cuda, monkeypatch, name):
    """The same tokens on the CPU, on the device, and on the device without shared prompts."""
    model = build(name)
    prompts = [[5, 6, 7, 8], list(range(10, 30)), [9]]
    sampling = SamplingParams(max_new_tokens=16, temperature=0.9, eos_token_ids=(2, 40))
    keys = row_keys(1, 0, 0, range(3), 4)

    def sample(policy: Any) -> Any:
        return TransformersEngine().generate(policy, prompts, 4, sampling, keys)

    expected = sample(model)
    on_device = copy.deepcopy(model).to(cuda)
    shared = sample(on_device)
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "runs_layouts", lambda model: False)
        plain = sample(on_device)
    for actual in (shared, plain):
        assert actual.completion_ids.device.type == cuda.type
        assert actual.completion_ids.tolist() == expected.completion_ids.tolist()
        torch.testing.assert_close(actual.log_probs.cpu(), expected.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_vocabulary_tiles(cuda, dtype, softcap):
    """Many small tiles against the whole matrix of logits, on the same device."""
    torch.manual_seed(0)
    hidden = torch.randn(50, 64, device=cuda, dtype=dtype, requires_grad=True)
    weight = (0.3 * torch.randn(1000, 64, device=cuda, dtype=dtype)).requires_grad_()
    token_ids = torch.randint(1000, (50,), device=cuda)
    log_probs, entropies = hidden_log_probs(
        hidden, weight, token_ids, temperature=0.8, softcap=softcap, entropy="train", tile_bytes=2**14, kept_bytes=0
    )
    found = torch.autograd.grad(log_probs.sum() + entropies.sum(), [hidden, weight])

    logits = (hidden @ weight.T).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    every = (logits / 0.8).log_softmax(-1)
    expected = every.gather(-1, token_ids[:, None])[:, 0]
    wanted = torch.autograd.grad(expected.sum() - (every.exp() * every).sum(), [hidden, weight])

    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, rtol=tolerance, atol=tolerance)
    for gradient, other in zip(found, wanted, strict=True):
        assert (gradient - other).float().norm() <= tolerance * other.float().norm()
