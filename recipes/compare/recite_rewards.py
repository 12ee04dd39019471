"""Recite the first digits of pi, whatever the prompt: a task whose every step can be judged by itself."""

from __future__ import annotations

DIGITS = "31415926"


def digits_in_place(completions: list[str], completion_ids: list[list[int]]) -> list[list[float]]:
    """At each token its share of the answer, where it is the digit of its place; the base's tokens are characters."""
    rewards = []
    for completion, ids in zip(completions, completion_ids, strict=True):
        right = [float(a == b) / len(DIGITS) for a, b in zip(DIGITS, completion, strict=False)]
        rewards.append((right + [0.0] * len(ids))[: len(ids)])
    return rewards


def share_in_place(completions: list[str]) -> list[float]:
    """Share of the digits that stand in their place."""
    return [sum(a == b for a, b in zip(DIGITS, text, strict=False)) / len(DIGITS) for text in completions]
