"""Read, tokenize and check the prompts of one split, before any model is loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lit_rlhf.errors import DataError, LitRLHFError
from lit_rlhf.models.loading import context_length
from lit_rlhf.rollout.checks import check_lengths
from lit_rlhf.rollout.ratings import Ratings, load_ratings

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import PromptDataset
    from lit_rlhf.modules.base import PolicyModule
    from lit_rlhf.rewards.combine import RewardScorer
    from lit_rlhf.rollout.datamodule import RolloutDataModule

_log = logging.getLogger(__name__)


def load_part(data: RolloutDataModule, part: str, module: PolicyModule) -> PromptDataset:
    """Prompts of a data set; whatever is wrong with them is said here, with the name of the set if it has one.

    Args:
        data: Names the source and how it is read.
        part: ``train``, ``val``, ``test``, or one of several sets, such as ``val/sums``.
        module: Its tokenizer and its context length decide.
    """
    split, _, name = part.partition("/")
    try:
        prompts = data.load_prompts(part, module.tokenizer)
        for scorer in scorers_of(data, split):
            scorer.check(prompts.columns)
            if problems := unreadable_golds(scorer, prompts):
                first = "; ".join(f"{prompts.where(row)}: {problem}" for row, problem in list(problems.items())[:3])
                _log.warning("%s: %d rows cannot be judged, the first: %s", prompts.name, len(problems), first)
        check_lengths(prompts, split, data.sampling.max_new_tokens, context_length(module.model_config))
    except LitRLHFError as error:
        if name:
            raise type(error)(f"{part}: {error}") from error
        raise
    return prompts


def load_val_ratings(data: RolloutDataModule, split: str) -> Ratings | None:
    """People's ratings of the held-out completions; none of test prompts that are not those of val.

    Args:
        data: With the prompts of the split.
        split: ``val`` or ``test``.
    """
    if data.val_ratings is None or data.sources[split] is not data.sources["val"]:
        return None
    try:
        return load_ratings(
            data.val_ratings, {part.partition("/")[2]: data.prompts[part] for part in data.parts(split)}
        )
    except DataError as error:
        raise DataError(f"val_ratings: {error}") from error


def scorers_of(data: RolloutDataModule, split: str) -> list[RewardScorer]:
    """What scores the completions of a split: the rewards and, on held-out prompts, the verifier.

    Args:
        data: With its rewards.
        split: ``train``, ``val`` or ``test``.
    """
    return [data.scorer] + ([data.verifier] if data.verifier and split != "train" else [])


def unreadable_golds(scorer: RewardScorer, prompts: PromptDataset) -> dict[int, str]:
    """Prompts that a reward function cannot judge, before they are paid for.

    Args:
        scorer: Those of its functions that have a method ``check_columns`` are asked.
        prompts: Of one split.

    Returns:
        What is wrong, by the place of the prompt in ``prompts``.
    """
    problems: dict[int, str] = {}
    for function in scorer.functions:
        if not hasattr(function, "check_columns"):
            continue
        for row, prompt in enumerate(prompts.prompts):
            # One row at a time: its place in the file is known here alone, so the function's own numbering goes.
            said = function.check_columns({name: [value] for name, value in prompt.columns.items()})
            if said and row not in problems:
                problems[row] = "; ".join(said).replace(" of row 0", "")
    return problems
