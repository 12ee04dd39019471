"""Log-probs from packed rows: each prompt once, no padding, the vocabulary head where a completion's token is due."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bare.attention import Packed, Span, hidden_states, layout

Group = tuple[list[int], list[list[int]]]
CHUNK_BYTES = 2**22  # of logits that are worked on at once: what the caches hold


class Pack:
    """Prompts and completions in one row.

    Args:
        groups: Each prompt with its completions.
    """

    def __init__(self, groups: list[Group]) -> None:
        ids: list[int] = []
        positions: list[int] = []
        spans: list[tuple[Span, list[Span]]] = []
        sources: list[int] = []
        for prompt, completions in groups:
            start = len(ids)
            ids += prompt
            positions += range(len(prompt))
            own = []
            for completion in completions:
                first = len(ids)
                # The prompt's last place predicts the first token, each token the next.
                sources += [start + len(prompt) - 1, *range(first, first + len(completion) - 1)]
                ids += completion
                positions += range(len(prompt), len(prompt) + len(completion))
                own.append((first, len(ids)))
            spans.append(((start, start + len(prompt)), own))
        self.ids, self.positions = torch.tensor([ids]), torch.tensor([positions])
        self.layout = Packed(spans)
        self.sources = torch.tensor(sources)
        self.targets = torch.tensor([token for _, completions in groups for row in completions for token in row])

    def log_probs(self, model: Any) -> tuple[Tensor, Tensor]:
        """``(M,)`` log-probs of all completion tokens, and the exact entropies."""
        with layout(self.layout):
            hidden = hidden_states(model, self.ids, self.positions)[0]
        return _Head.apply(hidden[self.sources], model.lm_head.weight, self.targets)


class _Head(torch.autograd.Function):
    """Vocabulary head, log-softmax and entropy while a chunk of logits is still in the caches."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        probs = hidden.new_empty(len(hidden), len(weight)) if any(ctx.needs_input_grad[:2]) else None
        chunk = max(1, CHUNK_BYTES // (4 * len(weight)))
        log_probs, entropies = [], []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = torch.mm(hidden[part], weight.T)
            logits -= logits.amax(dim=1, keepdim=True)
            scores = logits.gather(1, targets[part, None])[:, 0]
            exps = logits.exp() if probs is None else torch.exp(logits, out=probs[part])
            total = exps.sum(dim=1)
            log_total = total.log()
            log_probs.append(scores - log_total)
            if probs is not None:
                entropies.append(log_total - torch.linalg.vecdot(exps, logits) / total)
                exps /= total[:, None]
        ctx.save_for_backward(hidden, weight, targets)
        ctx.probs = probs
        found = torch.cat(log_probs)
        entropy = torch.cat(entropies) if entropies else torch.zeros_like(found)
        ctx.mark_non_differentiable(entropy)
        return found, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        hidden, weight, targets = ctx.saved_tensors
        d_logits = ctx.probs.mul_(-grad[:, None])
        ctx.probs = None
        d_logits[torch.arange(len(targets)), targets] += grad
        return d_logits @ weight, d_logits.T @ hidden, None
