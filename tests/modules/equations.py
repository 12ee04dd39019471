"""The equations of papers and libraries, written out in float64, one completion and one token at a time.

Nothing here uses the library: a :class:`Case` in, the loss of one optimizer step out. Log-probs under the policy carry
the graph, so the gradient is checked as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Case:
    """Completions of one optimizer step.

    Args:
        log_probs: ``(N, T)`` under the policy now.
        old: ``(N, T)`` under the policy that sampled, as the trainer sees it.
        ref: ``(N, T)`` under the reference.
        engine: ``(N, T)`` under the policy that sampled, as the engine saw it.
        entropies: ``(N, T)`` of the policy that sampled.
        mask: ``(N, T)``, tokens that count.
        rewards: ``(N,)`` task rewards.
        group: ``(N,)``.
        scored: ``(N,)`` bool.
        finished: ``(N,)`` bool.
        max_new_tokens: The sampling limit.
    """

    log_probs: Tensor
    old: Tensor
    ref: Tensor
    engine: Tensor
    entropies: Tensor
    mask: Tensor
    rewards: Tensor
    group: Tensor
    scored: Tensor
    finished: Tensor
    max_new_tokens: int

    def __post_init__(self) -> None:
        self.rows = [i for i in range(len(self.rewards)) if self.scored[i]]

    def tokens(self, i: int) -> list[int]:
        return self.mask[i].nonzero()[:, 0].tolist()

    def others(self, i: int, itself: bool) -> list[int]:
        return [j for j in self.rows if self.group[j] == self.group[i] and (itself or j != i)]

    def is_dead(self, i: int) -> bool:
        return len({float(self.rewards[j]) for j in self.others(i, itself=True)}) == 1

    def kl1(self, i: int, start: int = 0) -> Tensor:
        """Sum over the tokens from ``start`` on, of the policy that sampled against the reference."""
        return sum((self.old[i, t] - self.ref[i, t] for t in self.tokens(i) if t >= start), torch.tensor(0.0).double())

    def ratio(self, i: int, t: int) -> Tensor:
        return (self.log_probs[i, t] - self.old[i, t]).exp()


def std(values: list[Tensor], ddof: int) -> Tensor:
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / (len(values) - ddof)).sqrt()


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def k3(case: Case, i: int, t: int) -> Tensor:
    d = case.log_probs[i, t] - case.ref[i, t]
    return torch.exp(-d) + d - 1


def normalised(case: Case, i: int, returns: Tensor, ddof: int = 0, eps: float = 0.0) -> Tensor:
    """``(r - mean) / (std + eps)``; 0 where the rewards of a group agree."""
    if case.is_dead(i):
        return torch.tensor(0.0).double()
    group = [returns[j] for j in case.others(i, itself=True)]
    return (returns[i] - sum(group) / len(group)) / (std(group, ddof) + eps)


def token_mean(case: Case, per_token: dict[tuple[int, int], Tensor]) -> Tensor:
    return -sum(per_token.values()) / len(per_token)


def every_token(case: Case):
    return [(i, t) for i in case.rows for t in case.tokens(i)]


def grpo(case: Case) -> Tensor:
    """DeepSeekMath, eq. 3 and 4, with beta 0.04."""
    sequences = []
    for i in case.rows:
        advantage = normalised(case, i, case.rewards)
        terms = [clip(case.ratio(i, t), advantage, 0.2, 0.2) - 0.04 * k3(case, i, t) for t in case.tokens(i)]
        if terms:
            sequences.append(sum(terms) / len(terms))
    return -sum(sequences) / len(sequences)


def dr_grpo(case: Case) -> Tensor:
    """Without the deviation and with one constant for all lengths."""
    total = torch.tensor(0.0).double()
    for i, t in every_token(case):
        group = [case.rewards[j] for j in case.others(i, itself=True)]
        total = total + clip(case.ratio(i, t), case.rewards[i] - sum(group) / len(group), 0.2, 0.2)
    return -total / (len(case.rewards) * case.max_new_tokens)


def dapo(case: Case) -> Tensor:
    """Eq. 8: clip higher, mean over all tokens."""
    advantages = {i: normalised(case, i, case.rewards) for i in case.rows}
    return token_mean(case, {(i, t): clip(case.ratio(i, t), advantages[i], 0.2, 0.28) for i, t in every_token(case)})


def rloo_advantage(case: Case, i: int) -> Tensor:
    """Reward less the KL of the whole completion, against the mean of the others; dead groups teach nothing here."""
    if case.is_dead(i):
        return torch.tensor(0.0).double()
    penalised = {j: case.rewards[j] - 0.04 * case.kl1(j) for j in case.others(i, itself=True)}
    others = [penalised[j] for j in case.others(i, itself=False)]
    return penalised[i] - sum(others) / len(others)


def rloo(case: Case) -> Tensor:
    """A completion is one action: its tokens add up, completions are averaged."""
    rows = [i for i in case.rows if case.tokens(i)]
    total = sum(clip(case.ratio(i, t), rloo_advantage(case, i), 0.2, 0.2) for i in rows for t in case.tokens(i))
    return -total / len(rows)


def reinforce_pp_advantages(case: Case) -> dict[tuple[int, int], Tensor]:
    """Reward less the KL that is still to come, normalised over all tokens of the batch."""
    raw = {(i, t): case.rewards[i] - 0.04 * case.kl1(i, t) for i, t in every_token(case)}
    mean, deviation = sum(raw.values()) / len(raw), std(list(raw.values()), 0)
    return {place: (value - mean) / deviation for place, value in raw.items()}


def reinforce_pp(case: Case) -> Tensor:
    advantages = reinforce_pp_advantages(case)
    return token_mean(case, {(i, t): clip(case.ratio(i, t), a, 0.2, 0.2) for (i, t), a in advantages.items()})


def gspo(case: Case) -> Tensor:
    """Eq. 5 and 7: one length-normalised ratio for a completion."""
    sequences = []
    for i in case.rows:
        places = case.tokens(i)
        if places:
            gap = sum(case.log_probs[i, t] - case.old[i, t] for t in places)
            sequences.append(clip((gap / len(places)).exp(), normalised(case, i, case.rewards), 3e-4, 4e-4))
    return -sum(sequences) / len(sequences)


def cispo(case: Case) -> Tensor:
    """The ratio, capped at 5 and held constant, weighs the log-prob."""
    return token_mean(
        case,
        {
            (i, t): torch.clamp(case.ratio(i, t).detach(), max=5.0)
            * normalised(case, i, case.rewards)
            * case.log_probs[i, t]
            for i, t in every_token(case)
        },
    )


def trl(case: Case) -> Tensor:
    """Bessel's deviation + 1e-4, no KL, mean over the tokens of the step."""
    advantages = {i: normalised(case, i, case.rewards, ddof=1, eps=1e-4) for i in case.rows}
    return token_mean(case, {(i, t): clip(case.ratio(i, t), advantages[i], 0.2, 0.2) for i, t in every_token(case)})


def verl(case: Case) -> Tensor:
    """Bessel's deviation + 1e-6, and a negative advantage counts at most three times."""
    terms = {}
    for i, t in every_token(case):
        advantage = normalised(case, i, case.rewards, ddof=1, eps=1e-6)
        term = clip(case.ratio(i, t), advantage, 0.2, 0.2)
        terms[i, t] = torch.max(term, 3.0 * advantage) if advantage < 0 else term
    return token_mean(case, terms)


def openrlhf(case: Case) -> Tensor:
    """The KL to come is subtracted from the normalised reward; dead groups keep it."""
    terms = {}
    for i, t in every_token(case):
        advantage = normalised(case, i, case.rewards, ddof=1, eps=1e-9) - 0.01 * case.kl1(i, t)
        terms[i, t] = clip(case.ratio(i, t), advantage, 0.2, 0.2)
    return token_mean(case, terms)


def open_instruct(case: Case) -> Tensor:
    """Centred rewards, tokens weighed by trainer over engine up to 2, plain k3 in the loss."""
    terms = {}
    for i, t in every_token(case):
        group = [case.rewards[j] for j in case.others(i, itself=True)]
        weight = torch.clamp((case.old[i, t] - case.engine[i, t]).exp(), max=2.0)
        term = clip(case.ratio(i, t), case.rewards[i] - sum(group) / len(group), 0.2, 0.272)
        terms[i, t] = weight * term - 0.05 * k3(case, i, t)
    return token_mean(case, terms)


# What no preset sets, next to the options that do.


def batch_scale(case: Case) -> Tensor:
    """All groups are divided by one deviation, that of all rewards."""
    deviation = std([case.rewards[i] for i in case.rows], 0) + 1e-4
    terms = {}
    for i, t in every_token(case):
        group = [case.rewards[j] for j in case.others(i, itself=True)]
        terms[i, t] = clip(case.ratio(i, t), (case.rewards[i] - sum(group) / len(group)) / deviation, 0.2, 0.2)
    return token_mean(case, terms)


def masked_truncated(case: Case) -> Tensor:
    """A completion that was cut off is in its group's mean, and its tokens are nowhere."""
    terms = {
        (i, t): clip(case.ratio(i, t), normalised(case, i, case.rewards, eps=1e-4), 0.2, 0.2)
        for i, t in every_token(case)
        if case.finished[i]
    }
    return token_mean(case, terms)


def top_entropy(case: Case) -> Tensor:
    """A fifth of the tokens, divided by the number of all of them."""
    places = every_token(case)
    threshold = sorted((float(case.entropies[place]) for place in places), reverse=True)[-(-len(places) // 5) - 1]
    terms = {}
    for i, t in places:
        kept = float(case.entropies[i, t] >= threshold)
        terms[i, t] = kept * clip(case.ratio(i, t), normalised(case, i, case.rewards, eps=1e-4), 0.2, 0.2)
    return token_mean(case, terms)


def masked_sequences(case: Case) -> Tensor:
    """Completions that trainer and engine disagree on by more than a factor of 3 weigh nothing."""
    terms = {}
    for i, t in every_token(case):
        weight = sum(case.old[i, s] - case.engine[i, s] for s in case.tokens(i)).exp()
        weight = weight if 1 / 3 <= weight <= 3 else 0.0 * weight
        terms[i, t] = weight * clip(case.ratio(i, t), normalised(case, i, case.rewards, eps=1e-4), 0.2, 0.2)
    return token_mean(case, terms)


def median_k2(case: Case) -> Tensor:
    """The middle of the group as baseline; k2 in the loss, weighed by the constant ratio."""
    terms = {}
    for i, t in every_token(case):
        group = [case.rewards[j] for j in case.others(i, itself=True)]
        middle = torch.stack(group).quantile(0.5)
        advantage = torch.tensor(0.0) if case.is_dead(i) else (case.rewards[i] - middle) / (std(group, 0) + 1e-4)
        d = case.log_probs[i, t] - case.ref[i, t]
        terms[i, t] = clip(case.ratio(i, t), advantage, 0.2, 0.2) - 0.1 * case.ratio(i, t).detach() * d**2 / 2
    return token_mean(case, terms)
