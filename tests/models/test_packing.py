"""Completions that share their prompt's forward pass, against each row alone."""

from __future__ import annotations

import logging

import pytest
import torch

from lit_rlhf.models import segments
from lit_rlhf.models.completions import Completions
from lit_rlhf.models.forward import completion_outputs
from lit_rlhf.models.layouts import runs_layouts
from lit_rlhf.models.lora import add_lora, enable_gradient_checkpointing
from lit_rlhf.models.packing import pack
from tests.models.zoo import ALONE, SHARING, build


@pytest.fixture(autouse=True, params=[0, segments.MOST_MASKED], ids=["pieces", "masked"])
def way(request, monkeypatch):
    """Short groups are computed whole, with a mask, longer ones piece by piece."""
    monkeypatch.setattr(segments, "MOST_MASKED", request.param)


# Prompts of three groups, with 3, 1 and 4 completions; one completion is empty.
PROMPTS = [[7, 8, 9, 10], [11], [3, 30, 12, 13, 14, 15, 16, 50, 51]]
COMPLETIONS = [[4, 5], [6, 7, 8, 9, 10], [2], [33, 34, 2], [60, 61, 62, 63], [70], [], [71, 72, 73, 74, 75, 76, 2]]
GROUPS = [0, 0, 0, 1, 2, 2, 2, 2]
COLUMNS = 7


def rows(order=range(8), extra_left=2, extra_right=1, filler=0, groups=GROUPS):
    width = max(map(len, PROMPTS)) + extra_left
    prompts = [PROMPTS[GROUPS[row]] for row in order]
    completions = [COMPLETIONS[row] for row in order]
    return Completions(
        torch.tensor([[filler] * (width - len(prompt)) + prompt for prompt in prompts]),
        torch.tensor([len(prompt) for prompt in prompts]),
        torch.tensor([c + [filler] * (COLUMNS + extra_right - len(c)) for c in completions]),
        torch.tensor([len(completion) for completion in completions]),
        torch.tensor([groups[row] for row in order]),
    )


def alone(model, order=range(8), temperature=1.0):
    """Log-probs of each row by itself, from the model's own logits."""
    for row in order:
        prompt, completion = PROMPTS[GROUPS[row]], COMPLETIONS[row]
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0] / temperature
        yield logits[len(prompt) - 1 : -1].log_softmax(-1)[range(len(completion)), completion]


def gradients(loss, model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@pytest.mark.parametrize("name", SHARING + ALONE)
def test_log_probs_and_gradients_equal_those_of_each_row_alone(name):
    model = build(name)
    expected = list(alone(model))
    expected_gradients = gradients(sum((row * row).sum() for row in expected), model)
    assert runs_layouts(model) == (name in SHARING)
    log_probs = completion_outputs(model, rows()).log_probs
    for actual, row in zip(log_probs, expected, strict=True):
        torch.testing.assert_close(actual[: len(row)], row, rtol=1e-5, atol=1e-5)
        assert (actual[len(row) :] == 0).all()
    largest = max(float(wanted.abs().max()) for wanted in expected_gradients if wanted is not None)
    for actual, wanted in zip(gradients((log_probs * log_probs).sum(), model), expected_gradients, strict=True):
        if wanted is not None:
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=2e-6 * largest)


@pytest.mark.parametrize("name", SHARING)
def test_the_model_itself_gives_the_same_numbers_as_before(name):
    ids = torch.tensor([PROMPTS[2] + COMPLETIONS[7]])
    expected = build(name)(input_ids=ids).logits
    model = build(name)
    runs_layouts(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2-window-softcap", "opt", "bloom"])
@pytest.mark.parametrize("order", [[4, 5, 0, 1, 6, 7], [7, 0, 6, 1], [3], [6]], ids=str)
def test_any_rows_in_any_order(name, order):
    model = build(name)
    expected = list(alone(model, order, temperature=0.7))
    log_probs = completion_outputs(model, rows(order, extra_left=0), temperature=0.7).log_probs
    for actual, row in zip(log_probs, expected, strict=True):
        torch.testing.assert_close(actual[: len(row)], row, rtol=1e-5, atol=1e-5)


def test_a_shared_prompt_is_in_the_packed_row_once():
    packed = pack(rows())
    assert packed.input_ids.shape == (1, sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS)))
    assert packed.input_ids[0].tolist()[:12] == [7, 8, 9, 10, 4, 5, 6, 7, 8, 9, 10, 2]
    assert packed.positions[0].tolist()[:12] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 4]
    apart = pack(rows(groups=list(range(8))))
    assert apart.input_ids.shape[1] == sum(len(PROMPTS[g]) + len(c) for g, c in zip(GROUPS, COMPLETIONS, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma2-window-softcap"])
def test_what_stands_in_the_padding_does_not_matter(name):
    model = build(name)
    one = completion_outputs(model, rows(filler=0)).log_probs
    two = completion_outputs(model, rows(filler=5, extra_left=4)).log_probs
    assert (one == two).all()


@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "gemma2-window-softcap"])
def test_gradient_checkpointing_recomputes_with_the_same_layout(name):
    plain, saving = build(name).train(), build(name).train()
    enable_gradient_checkpointing(saving)
    expected = gradients(completion_outputs(plain, rows()).log_probs.sum(), plain)
    log_probs = completion_outputs(saving, rows()).log_probs
    completion_outputs(saving, rows([3])).log_probs.sum()  # another layout before the backward pass
    for actual, wanted in zip(gradients(log_probs.sum(), saving), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_an_adapter_on_and_off(checkpointing):
    model = build("llama").train()
    expected_off = completion_outputs(model, rows()).log_probs
    adapted = add_lora(model, rank=2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    if checkpointing:
        enable_gradient_checkpointing(adapted)
    expected = list(alone(adapted))
    expected_gradients = gradients(sum(row.sum() for row in expected), adapted)
    log_probs = completion_outputs(adapted, rows()).log_probs
    for actual, row in zip(log_probs, expected, strict=True):
        torch.testing.assert_close(actual[: len(row)], row, rtol=1e-5, atol=1e-5)
    for actual, wanted in zip(gradients(log_probs.sum(), adapted), expected_gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    with adapted.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(completion_outputs(adapted, rows()).log_probs, expected_off, rtol=1e-5, atol=1e-5)


def test_under_autocast_the_layout_gets_one_type(monkeypatch):
    model = build("llama")
    exact = completion_outputs(model, rows()).log_probs
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = completion_outputs(model, rows()).log_probs
    assert log_probs.dtype == torch.float32
    assert 0 < (log_probs - exact).abs().max() < 0.3


def test_an_architecture_that_cannot_is_named_once(caplog):
    model = build("bloom")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            completion_outputs(model, rows())
    assert sum("BloomForCausalLM" in record.message for record in caplog.records) == 1


def test_eager_attention_that_was_asked_for_stays():
    model = build("llama")
    model.set_attn_implementation("eager")
    assert not runs_layouts(model)
    assert model.config._attn_implementation == "eager"


def test_a_copy_of_a_switched_model_runs_layouts_too():
    import copy

    model = build("llama")
    expected = completion_outputs(model, rows()).log_probs
    assert (completion_outputs(copy.deepcopy(model), rows()).log_probs == expected).all()


def test_empty_rows_keep_the_graph():
    model = build("llama")
    outputs = completion_outputs(model, rows([6]), entropy="train")
    assert outputs.log_probs.requires_grad
    assert all((g == 0).all() for g in gradients(outputs.log_probs.sum(), model) if g is not None)
