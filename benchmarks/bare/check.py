"""The floor computes what the stock model computes: a fast wrong answer would be no floor."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from workload import EOS, FIRST_WORD, Work, model_folder

from bare import decoding
from bare.attention import take_over
from bare.training import Pack

TOLERANCE = 1e-4


def differences() -> dict[str, float]:
    """What differs from single rows of the stock model, run without padding: log-probs, entropies, gradients."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = Work("mini", prompts=3, group=4, prompt_tokens=(8, 24), new_tokens=40)
    stock = AutoModelForCausalLM.from_pretrained(model_folder(work.shape), dtype=torch.float32)
    with torch.no_grad():
        for weight in stock.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)  # far from the flat distributions of a new model
    model = copy.deepcopy(stock)
    take_over(model)
    prompts, lengths = work.prompt_ids(), work.completion_lengths()
    drawn: list[Tensor] = []
    sampled = decoding.generate(
        model, prompts, work.group, lengths, work.new_tokens, EOS, FIRST_WORD, watch=drawn.append
    )
    groups = [(prompt, sampled[i * work.group : (i + 1) * work.group]) for i, prompt in enumerate(prompts)]
    log_probs, entropies = Pack(groups).log_probs(model)
    weights = torch.randn(len(log_probs))
    (log_probs * weights).sum().backward()
    expected = [_single(stock, prompt, row) for prompt, rows in groups for row in rows]
    scores = torch.cat([found for found, _ in expected])
    (scores * weights).sum().backward()
    gaps = {
        "lengths": float([len(row) for row in sampled] != lengths),
        "log-probs": float((log_probs - scores).detach().abs().max()),
        "entropies": float((entropies - torch.cat([entropy for _, entropy in expected])).abs().max()),
        "gradients": max(
            float((mine - theirs).norm() / theirs.norm())
            for mine, theirs in zip(_gradients(model), _gradients(stock), strict=True)
        ),
        "log-probs while sampling": max(
            abs(float(drawn[step][row] - found[step]))
            for row, (found, _) in enumerate(expected)
            for step in range(lengths[row])
        ),
    }
    return {name: gap for name, gap in gaps.items() if not gap <= TOLERANCE}  # NaN differs, too


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _single(model: Any, prompt: list[int], completion: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of one row, run on its own."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    return logits.gather(1, torch.tensor(completion)[:, None])[:, 0], -(logits.exp() * logits).sum(dim=-1).detach()
