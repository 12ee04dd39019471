"""Memory of the log-prob step alone: hidden states to log-probs and entropies, and back."""

from __future__ import annotations

from typing import Literal

from race import elsewhere

TOKENS, HIDDEN = 1024, 64
Kind = Literal["chunked, nothing kept", "chunked", "plain"]


def log_prob_bytes(vocabulary: int, kind: Kind) -> int:
    """Most memory the step holds beyond its inputs and their gradients, in a process of its own.

    Args:
        vocabulary: ``V``.
        kind: Our chunks, with or without those that are kept for the backward pass up to a fixed number of bytes; or
            plain logits with a log-softmax.
    """
    return elsewhere(_measure, vocabulary, kind)


def _measure(vocabulary: int, kind: Kind) -> int:
    import torch
    from gate import peak_bytes, resident_bytes

    from lit_rlhf.functional.log_probs import entropy, token_log_probs
    from lit_rlhf.functional.vocabulary import hidden_log_probs

    torch.set_num_threads(1)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    ids = torch.randint(vocabulary, (TOKENS,))
    inputs = [tensor.detach()[:16].requires_grad_() for tensor in (hidden, weight)]
    hidden_log_probs(*inputs, ids[:16] % 16, entropy="detached")[0].sum().backward()  # warm-up
    before = resident_bytes()
    if kind == "plain":
        logits = hidden @ weight.T
        log_probs = token_log_probs(logits, ids)
        with torch.no_grad():
            entropy(logits)
    else:
        kept = {"kept_bytes": 0} if kind == "chunked, nothing kept" else {}
        log_probs, _ = hidden_log_probs(hidden, weight, ids, entropy="detached", **kept)
    log_probs.sum().backward()
    gradients = sum(tensor.nbytes for tensor in (hidden, weight))
    return max(0, peak_bytes() - before - gradients)
