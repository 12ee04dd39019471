"""Read, tokenize and check the prompts of one split, before any model is loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lit_rlhf.data.prompts import PromptDataset, load_prompts
from lit_rlhf.models.loading import context_length
from lit_rlhf.rollout.checks import check_lengths

if TYPE_CHECKING:
    from lit_rlhf.modules.base import PolicyModule
    from lit_rlhf.rewards.combine import RewardScorer
    from lit_rlhf.rollout.datamodule import RolloutDataModule

_log = logging.getLogger(__name__)


def load_split(data: RolloutDataModule, split: str, module: PolicyModule) -> PromptDataset:
    """Prompts of a split; whatever is wrong with them is said here.

    Args:
        data: Names the source and how it is read.
        split: ``train``, ``val`` or ``test``.
        module: Its tokenizer and its context length decide.
    """
    prompts = load_prompts(
        data.sources[split],
        module.tokenizer,
        prompt_column=data.prompt_column,
        system_prompt=data.system_prompt,
        max_prompt_length=data.max_prompt_length,
        overlong=data.overlong_prompts,
    )
    for scorer in [data.scorer] + ([data.verifier] if data.verifier and split != "train" else []):
        scorer.check(prompts.columns)
        _report_golds(scorer, prompts)
    check_lengths(prompts, split, data.sampling.max_new_tokens, context_length(module.model_config))
    return prompts


def _report_golds(scorer: RewardScorer, prompts: PromptDataset) -> None:
    """Say which rows a reward function cannot judge, before they are paid for."""
    columns = {name: [prompt.columns[name] for prompt in prompts.prompts] for name in prompts.columns}
    for function in scorer.functions:
        problems = function.check_columns(columns) if hasattr(function, "check_columns") else []
        if problems:
            _log.warning("%s: %d problems, the first: %s", prompts.name, len(problems), "; ".join(problems[:3]))
