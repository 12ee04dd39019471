"""Log-probs of padded rows against plain forward passes of each row alone."""

from __future__ import annotations

import pytest
import torch

from lit_rlhf.functional import mask_from_lengths
from lit_rlhf.models.completions import Completions
from lit_rlhf.models.forward import completion_outputs

PROMPTS = [[7, 8, 9, 10], [11], [3, 30, 12, 13, 14, 15, 16], [17, 18]]
COMPLETIONS = [[4, 5], [6, 7, 8, 9, 10], [2], [33, 34, 2]]
PROMPT_LENGTHS = torch.tensor([4, 1, 7, 2])
LENGTHS = torch.tensor([2, 5, 1, 3])


def padded(extra_left=0, extra_right=0, filler=0):
    prompts = [[filler] * (7 + extra_left - len(prompt)) + prompt for prompt in PROMPTS]
    completions = [completion + [filler] * (5 + extra_right - len(completion)) for completion in COMPLETIONS]
    return Completions(
        torch.tensor(prompts), PROMPT_LENGTHS, torch.tensor(completions), LENGTHS, torch.arange(len(PROMPTS))
    )


def by_hand(model, temperature):
    """Log-probs and entropies of each row alone, by a full softmax."""
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].double() / temperature
        probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
        before = probs[len(prompt) - 1 : -1]
        yield before[range(len(completion)), completion].log(), -(before * before.log()).sum(-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (0, 2), (5, 4)], ids=str)
def test_log_probs_and_entropy_equal_those_of_each_row_alone(model, temperature, padding):
    with torch.no_grad():
        outputs = completion_outputs(model, padded(*padding), temperature, entropy="train")
        log_probs, entropies = outputs.log_probs, outputs.entropy
        expected = list(by_hand(model, temperature))
    assert log_probs.shape == entropies.shape == (4, 5 + padding[1])
    for row, (row_log_probs, row_entropies) in enumerate(expected):
        length = LENGTHS[row]
        torch.testing.assert_close(log_probs[row, :length].double(), row_log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropies[row, :length].double(), row_entropies, rtol=0, atol=1e-5)


def test_what_stands_in_the_padding_does_not_matter(model):
    mask = mask_from_lengths(LENGTHS, 5)
    with torch.no_grad():
        one = completion_outputs(model, padded(filler=0)).log_probs
        two = completion_outputs(model, padded(filler=2)).log_probs
    torch.testing.assert_close(one[mask], two[mask], rtol=0, atol=1e-6)


def test_gradients_equal_those_of_the_rows_alone(model):
    mask = mask_from_lengths(LENGTHS, 5)
    log_probs = completion_outputs(model, padded(extra_left=3)).log_probs
    loss = torch.where(mask, log_probs, 0.0).sum()
    parameters = list(model.parameters())
    actual = torch.autograd.grad(loss, parameters)
    expected = torch.autograd.grad(sum(row.sum() for row, _ in by_hand(model, 1.0)), parameters)
    for one, two in zip(actual, expected, strict=True):
        assert two.abs().max() > 0
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4 * float(two.abs().max()))


def test_entropy_is_only_computed_on_request(model):
    with torch.no_grad():
        assert completion_outputs(model, padded()).entropy is None


def test_bfloat16_models_give_float32_log_probs(model):
    model.bfloat16()
    with torch.no_grad():
        outputs = completion_outputs(model, padded(), entropy="train")
        log_probs, entropies = outputs.log_probs, outputs.entropy
        logits = model(input_ids=torch.tensor([PROMPTS[2] + COMPLETIONS[2]])).logits[0, -2]
    assert logits.dtype == torch.bfloat16
    assert log_probs.dtype == entropies.dtype == torch.float32
    # bfloat16 log-probs would be multiples of 1/256 or coarser.
    assert ((log_probs[log_probs != 0] * 256).frac() != 0).float().mean() > 0.9
    expected = logits.double().log_softmax(-1)[COMPLETIONS[2][0]]
    assert abs(float(log_probs[2, 0]) - float(expected)) < 0.15


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_adapter_does_not_hide_the_positions(make_model, name):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=False)
    adapted = get_peft_model(make_model(name), config).eval()
    with torch.no_grad():
        log_probs = completion_outputs(adapted, padded(extra_left=3)).log_probs
        expected = list(by_hand(adapted, 1.0))
        plain = completion_outputs(make_model(name), padded(extra_left=3)).log_probs
    assert (log_probs - plain).abs().max() > 0.1
    for row, (row_log_probs, _) in enumerate(expected):
        torch.testing.assert_close(log_probs[row, : LENGTHS[row]].double(), row_log_probs, rtol=0, atol=1e-5)
