"""The floor: one GRPO step from bare loops, as the third side of a race."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from gate import Gate
from torch import Tensor
from workload import EOS, FIRST_WORD, MICRO_BATCH_TOKENS, Work, model_folder, share_of_even

from bare.attention import take_over
from bare.decoding import generate
from bare.training import Group, Pack


def run(connection: Connection, work: Work, threads: int) -> None:
    """Train until no further step is wanted.

    Args:
        connection: To the race.
        work: What a step is.
        threads: Of torch.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gate = Gate(connection, {"micro_batch_tokens": MICRO_BATCH_TOKENS, "dtype": "float32"})
    folder = model_folder(work.shape)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy, *reference = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(1 + (work.kl_coef > 0))
    ]
    for model in (policy, *reference):
        take_over(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    prompts, lengths, data = work.prompt_ids(), work.completion_lengths(), work.data()
    columns = {name: [row[name] for row in data for _ in range(work.group)] for name in ("solved", "binary")}
    while True:
        gate.open()
        with gate.phase("generation"):
            completions = generate(policy, prompts, work.group, lengths, work.new_tokens, EOS, FIRST_WORD)
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = torch.tensor(share_of_even(texts, **columns)).view(work.prompts, work.group)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        tokens = sum(map(len, completions))
        rows = [completions[start : start + work.group] for start in range(0, work.rows, work.group)]
        for numbers in _micro_batches(list(zip(prompts, rows, strict=True))):
            pack = Pack([(prompts[number], rows[number]) for number in numbers])
            of_tokens = torch.cat([advantages[g, i].expand(len(row)) for g in numbers for i, row in enumerate(rows[g])])
            ref_log_probs = None
            if reference:
                with gate.phase("reference"), torch.no_grad():
                    ref_log_probs = pack.log_probs(reference[0])[0]
            with gate.phase("forward"):
                log_probs, _entropy = pack.log_probs(policy)
                loss = _loss(log_probs, ref_log_probs, of_tokens, work.kl_coef) / tokens
            with gate.phase("backward"):
                loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gate.count(generated=tokens, trained=tokens + work.group * sum(map(len, prompts)))


def _loss(log_probs: Tensor, ref_log_probs: Tensor | None, advantages: Tensor, kl_coef: float) -> Tensor:
    """Clipped surrogate and ratio-weighted k3, summed over the tokens."""
    ratio = (log_probs - log_probs.detach()).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if ref_log_probs is not None:
        gap = ref_log_probs - log_probs
        loss = loss + kl_coef * ratio * (gap.exp() - gap - 1)
    return loss.sum()


def _micro_batches(groups: list[Group]) -> Iterator[list[int]]:
    """Numbers of neighbouring groups that together have few enough tokens."""
    chosen: list[int] = []
    held = 0
    for number, (prompt, completions) in enumerate(groups):
        size = len(prompt) + sum(map(len, completions))
        if chosen and held + size > MICRO_BATCH_TOKENS:
            yield chosen
            chosen, held = [], 0
        chosen.append(number)
        held += size
    yield chosen
