"""From prompts to scored completions: the phases of a rollout, in the order of the data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lit_rlhf.engines.base import Generation, RolloutEngine, SamplingParams
from lit_rlhf.engines.decoding import left_pad
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.engines.stopping import completion_text
from lit_rlhf.functional.masking import mask_from_lengths
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.strategies import rollout_weights, together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.rewards.combine import RewardScorer

# Further draws of an iteration use the numbers after the last.
TRAIN_STREAM, EVALUATION_STREAM, REDRAW_STREAM = 0, 1, 2


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, weights as rollouts want them; every submodule's mode is afterwards what it was.

    Not inference mode: its tensors could not be used in the training forward.

    Args:
        module: With all its submodules; its ``rollout_weights``, if any, say where sharded weights are meanwhile.
    """
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), rollout_weights(module, getattr(module, "rollout_weights", "whole")):
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode


class PhaseTimer:
    """Seconds spent in each phase of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds inside the block to a phase.

        Args:
            phase: For instance ``generation``.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def sample_completions(
    policy: nn.Module,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    group_index: Sequence[int],
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    iteration: int,
    stream: int = TRAIN_STREAM,
) -> RolloutBatch:
    """Sample ``num_samples`` completions of each prompt; rewards are still empty.

    Args:
        policy: In evaluation mode.
        engine: Does the sampling.
        tokenizer: The policy's, for texts and stop strings.
        prompts: ``B`` prompts of this rank.
        group_index: ``B`` numbers, unique over the ranks of this iteration.
        num_samples: ``G``.
        sampling: How.
        seed: Of the run.
        iteration: Of the run.
        stream: Keeps the random numbers of training and evaluation apart.

    Returns:
        ``B * G`` rows on the policy's device, the rows of a prompt together.
    """
    keys = row_keys(seed, stream, iteration, [prompt.index for prompt in prompts], num_samples)
    if (prepare := getattr(engine, "prepare", None)) is not None:
        prepare(policy, tokenizer)
    with together():  # on a rank that drew nothing, too
        if prompts:
            ids = [prompt.ids for prompt in prompts]
            generation = engine.generate(policy, ids, num_samples, sampling, keys, tokenizer)
        else:
            generation = no_completions(next(policy.parameters()).device)
    return unscored_rollout(generation, tokenizer, prompts, group_index, num_samples, sampling)


def no_completions(device: torch.device) -> Generation:
    """What there is where there are no prompts.

    Args:
        device: Of its tensors.
    """
    ids = torch.zeros(0, 1, dtype=torch.long, device=device)
    return Generation(ids, ids[:, 0], ids.float(), ids[:, 0].bool())


def unscored_rollout(
    generation: Generation,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    group_index: Sequence[int],
    num_samples: int,
    sampling: SamplingParams,
) -> RolloutBatch:
    """Completions with their prompts and texts.

    Args:
        generation: ``B * G`` rows.
        tokenizer: The policy's.
        prompts: ``B`` prompts that they were sampled from.
        group_index: ``B`` numbers, unique over the ranks of this iteration.
        num_samples: ``G``.
        sampling: How they were sampled.
    """
    completion_ids, lengths = generation.completion_ids, generation.lengths
    device = completion_ids.device
    if prompts:
        prompt_ids, prompt_mask = left_pad([prompt.ids for prompt in prompts], sampling.pad_token_id, device)
    else:
        prompt_ids, prompt_mask = completion_ids[:0], torch.zeros(0, 1, device=device)
    rows = len(prompts) * num_samples
    texts = [
        completion_text(tokenizer, row[:length], sampling.stop)
        for row, length in zip(completion_ids.tolist(), lengths.tolist(), strict=True)
    ]

    def per_row(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device).repeat_interleave(num_samples)

    return RolloutBatch(
        prompt_ids=prompt_ids.repeat_interleave(num_samples, dim=0),
        prompt_lengths=prompt_mask.sum(dim=1).long().repeat_interleave(num_samples),
        completion_ids=completion_ids,
        completion_lengths=lengths,
        completion_mask=mask_from_lengths(lengths, completion_ids.shape[1]),
        finished=generation.finished,
        group_index=per_row(group_index),
        prompt_index=per_row([prompt.index for prompt in prompts]),
        sampling_log_probs=generation.log_probs,
        rewards=torch.zeros(rows, device=device),
        scored_mask=torch.zeros(rows, dtype=torch.bool, device=device),
        reward_components=torch.zeros(rows, 0, device=device),
        outcome_mask=torch.zeros(rows, dtype=torch.bool, device=device),
        prompts=tuple(prompt.text for prompt in prompts for _ in range(num_samples)),
        completions=tuple(texts),
        temperature=sampling.temperature or 1.0,
    )


def score_completions(rollout: RolloutBatch, prompts: Sequence[Prompt], scorer: RewardScorer) -> RolloutBatch:
    """Fill in the rewards.

    Args:
        rollout: Rows of :func:`sample_completions`.
        prompts: The prompts they were sampled from; their columns go to the reward functions by name.
        scorer: Calls the reward functions.
    """
    by_index = {prompt.index: prompt for prompt in prompts}
    owners = [by_index[index] for index in rollout.prompt_index.tolist()]
    names = list(owners[0].columns) if owners else []
    columns = {name: [owner.columns[name] for owner in owners] for name in names}
    ids = [
        row[:length]
        for row, length in zip(rollout.completion_ids.tolist(), rollout.completion_lengths.tolist(), strict=True)
    ]
    # Conversational prompts come with conversational completions, as people's reward functions expect.
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(rollout.prompts, rollout.completions, strict=True)
    ]
    if not owners:
        nothing = rollout.rewards.new_zeros(0, len(scorer.names))
        return rollout.replace(reward_components=nothing, reward_names=tuple(scorer.names))
    scores = scorer(prompts=list(rollout.prompts), completions=completions, completion_ids=ids, columns=columns)
    device = rollout.rewards.device
    return rollout.replace(
        rewards=scores.total.to(device),
        scored_mask=scores.scored_mask.to(device),
        reward_components=scores.components.to(device),
        outcome_mask=scores.outcome_mask.to(device),
        token_rewards=None if scores.token_rewards is None else scores.token_rewards.to(device),
        reward_names=tuple(scores.names),
    )
