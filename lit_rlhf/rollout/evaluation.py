"""Held-out prompts: one greedy completion and several sampled ones each, judged by the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.generation import EVALUATION_STREAM, evaluation_mode, sample_completions, score_completions
from lit_rlhf.rollout.pipeline import all_ranks_or_none

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.engines.base import SamplingParams
    from lit_rlhf.modules.causal_lm import CausalLMModule
    from lit_rlhf.rollout.datamodule import RolloutDataModule


@dataclass(frozen=True)
class Judged:
    """Completions of held-out prompts and whether each is right.

    Args:
        rollout: ``M * n`` rows, scored by the training rewards.
        correct: ``(M, n)`` bool.
    """

    rollout: RolloutBatch
    correct: Tensor


def evaluate_prompts(
    module: CausalLMModule, data: RolloutDataModule, prompts: Sequence[Prompt]
) -> tuple[Judged, Judged | None]:
    """Complete and judge prompts. Random numbers are the evaluation's own and the same at every evaluation.

    Args:
        module: With its policy.
        data: With engine, sampling and rewards.
        prompts: ``M`` held-out prompts. Every rank has to take part, if only with none.

    Returns:
        The greedy completions (``n = 1``) and the sampled ones (``n = val_samples``; ``None`` if that is 0).
    """
    sampled = replace(data.sampling, temperature=data.val_temperature)
    greedy = _judge(module, data, prompts, data.sampling.greedy(), 1)
    return greedy, _judge(module, data, prompts, sampled, data.val_samples) if data.val_samples else None


def _judge(
    module: CausalLMModule, data: RolloutDataModule, prompts: Sequence[Prompt], sampling: SamplingParams, n: int
) -> Judged:
    assert data.seed is not None
    assert module.policy is not None
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
            iteration=0,
            stream=EVALUATION_STREAM,
        )
        with all_ranks_or_none(module.trainer):
            scored = score_completions(rollout, prompts, data.scorer)
            judged = score_completions(rollout, prompts, data.verifier) if data.verifier else scored
    # Where the verifier abstained (NaN) nothing was shown to be right.
    correct = judged.reward_components[:, 0] >= data.verifier_threshold
    return Judged(scored, correct.reshape(len(prompts), n))
