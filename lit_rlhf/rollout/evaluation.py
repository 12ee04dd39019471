"""Held-out prompts: one greedy completion and several sampled ones each, judged by the verifier."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rlhf.functional.majority_vote import majority_vote
from lit_rlhf.functional.pass_at_k import pass_at_k
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.generation import EVALUATION_STREAM, evaluation_mode, sample_completions, score_completions
from lit_rlhf.rollout.pipeline import all_ranks_or_none

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.engines.base import SamplingParams
    from lit_rlhf.modules.causal_lm import CausalLMModule
    from lit_rlhf.rollout.datamodule import RolloutDataModule
    from lit_rlhf.rollout.held_out import HeldOutBatch


@dataclass(frozen=True)
class Judged:
    """Completions of held-out prompts and whether each is right.

    Args:
        rollout: ``M * n`` rows, scored by the training rewards.
        scores: ``(M, n)`` float32 the verifier's; NaN where it abstained.
        correct: ``(M, n)`` bool.
        answers: ``M`` lists of ``n`` answers that are voted on, ``None`` for one without; ``None`` where the verifier
            cannot say what a completion's answer is.
    """

    rollout: RolloutBatch
    scores: Tensor
    correct: Tensor
    answers: list[list[Hashable | None]] | None


@dataclass(frozen=True)
class Evaluated:
    """A batch of held-out prompts, completed and judged; what ``validation_step`` and ``test_step`` return.

    Args:
        batch: ``M`` prompts.
        greedy: One completion of each.
        sampled: ``val_samples`` of each; ``None`` if that is 0.
    """

    batch: HeldOutBatch
    greedy: Judged
    sampled: Judged | None


def judge_of(data: RolloutDataModule) -> Callable[..., Any]:
    """The function that says whether a held-out completion is right: the verifier, else the first reward.

    Args:
        data: With its rewards.
    """
    return (data.verifier or data.scorer).functions[0]


def votes(data: RolloutDataModule) -> bool:
    """Whether there is a majority vote: several samples, and a verifier that says what is voted on.

    Args:
        data: With its rewards.
    """
    return data.val_samples > 1 and hasattr(judge_of(data), "answer_key")


def evaluate_prompts(module: CausalLMModule, data: RolloutDataModule, batch: HeldOutBatch) -> Evaluated:
    """Complete and judge prompts. Random numbers are the evaluation's own and the same at every evaluation.

    Args:
        module: With its policy.
        data: With engine, sampling and rewards.
        batch: ``M`` held-out prompts. Every rank has to take part, if only with none.
    """
    greedy = _judge(module, data, batch, data.sampling.greedy(), 1)
    if not data.val_samples:
        return Evaluated(batch, greedy, None)
    sampling = replace(data.sampling, temperature=data.val_temperature)
    return Evaluated(batch, greedy, _judge(module, data, batch, sampling, data.val_samples))


def _judge(
    module: CausalLMModule, data: RolloutDataModule, batch: HeldOutBatch, sampling: SamplingParams, n: int
) -> Judged:
    assert data.seed is not None
    assert module.policy is not None
    prompts = batch.prompts
    with evaluation_mode(module):
        rollout = sample_completions(
            module.policy,
            data.engine,
            module.tokenizer,
            prompts,
            range(len(prompts)),
            n,
            sampling,
            data.seed,
            # Each set has numbers of its own, whatever other sets there are.
            iteration=zlib.crc32(batch.set_name.encode()),
            stream=EVALUATION_STREAM,
        )
        with all_ranks_or_none(module.trainer):
            scored = score_completions(rollout, prompts, data.scorer)
            scores = _verifier_scores(scored, prompts, data)
            answers = _answers(scored, prompts, judge_of(data), n) if votes(data) else None
    scores = scores.reshape(len(prompts), n)
    # Where the verifier abstained (NaN) nothing was shown to be right.
    return Judged(scored, scores, scores >= data.verifier_threshold, answers)


def _verifier_scores(scored: RolloutBatch, prompts: Sequence[Prompt], data: RolloutDataModule) -> Tensor:
    """``(N,)``; a verifier that is one of the rewards has been asked already."""
    judge = judge_of(data)
    for place, function in enumerate(data.scorer.functions):
        if function is judge:
            return scored.reward_components[:, place]
    assert data.verifier is not None
    return score_completions(scored, prompts, data.verifier).reward_components[:, 0]


def _answers(
    rollout: RolloutBatch, prompts: Sequence[Prompt], judge: Callable[..., Any], n: int
) -> list[list[Hashable | None]]:
    """What each completion of each prompt answers; completions come in the form that the verifier is given."""
    key: Callable[..., Hashable | None] = judge.answer_key  # type: ignore[attr-defined]
    answers = []
    for place, prompt in enumerate(prompts):
        texts = rollout.completions[place * n : (place + 1) * n]
        given = texts if isinstance(prompt.text, str) else [[{"role": "assistant", "content": text}] for text in texts]
        answers.append([key(completion, **prompt.columns) for completion in given])
    return answers


def prompt_values(evaluated: Evaluated, pass_k: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Every quantity of every prompt, as :class:`~lit_rlhf.metrics.PromptResults` takes it.

    Length, truncation, reward and the verifier's score are of the sampled completions, or of the greedy ones where
    there are none.

    Args:
        evaluated: ``M`` prompts.
        pass_k: The k of each ``pass@k``.

    Returns:
        Sum and count, each ``(M,)``, by name.
    """
    shown = evaluated.sampled or evaluated.greedy
    rollout, (prompts, n) = shown.rollout, shown.correct.shape

    def total(values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Over a prompt's completions; those outside the mask are left out."""
        values = values.double().reshape(prompts, n)
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.reshape(prompts, n)
        return values.where(mask, torch.zeros_like(values)).sum(dim=1), mask.sum(dim=1)

    def one(values: Tensor) -> tuple[Tensor, Tensor]:
        return values, torch.ones_like(values)

    found = {
        "accuracy": one(evaluated.greedy.correct[:, 0].double()),
        "completion_length": total(rollout.completion_lengths),
        "truncated": total(~rollout.finished),
        "reward": total(rollout.rewards, rollout.scored_mask),
        "verifier": total(shown.scores, ~shown.scores.isnan()),
    }
    if evaluated.sampled is not None:
        right = shown.correct.sum(dim=1)
        found["sampled_accuracy"] = total(shown.correct)
        found.update({f"pass@{k}": one(pass_at_k(n, right, k)) for k in pass_k})
        if shown.answers is not None:
            found[f"maj@{n}"] = one(majority_vote(*_ballots(shown.answers, shown.correct)))
    return found


def _ballots(answers: list[list[Hashable | None]], correct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers for the answers of each prompt, with what is right and which samples have an answer."""
    numbers: list[list[int]] = []
    for row in answers:
        seen: dict[Hashable, int] = {}
        numbers.append([-1 if answer is None else seen.setdefault(answer, len(seen)) for answer in row])
    ballots = torch.tensor(numbers, dtype=torch.long, device=correct.device).reshape(correct.shape)
    return ballots, correct, ballots >= 0
