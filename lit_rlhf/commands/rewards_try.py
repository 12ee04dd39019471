"""``lit-rlhf rewards try``: score a few completions with a recipe's rewards, and look at how each came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rlhf.commands.parsing import command_parser, parse_beside_recipe
from lit_rlhf.commands.recipe import Recipe, read_recipe
from lit_rlhf.data.prompts import Prompt, PromptDataset
from lit_rlhf.data.rows import read_rows
from lit_rlhf.errors import ConfigurationError, DataError
from lit_rlhf.models.loading import eos_token_ids
from lit_rlhf.rewards.combine import RewardScorer, RewardScores
from lit_rlhf.rewards.messages import column_values, completion_text, prompt_text
from lit_rlhf.rollout.generation import evaluation_mode, sample_completions
from lit_rlhf.rollout.sources import unreadable_golds

_DESCRIPTION = """Score completions with the rewards of a recipe and show, for each, its end, the answer that was
found in it, the reference, every reward and their weighted sum: before a run pays for them. The
completions are sampled from the policy, or read from a file (jsonl, json, csv, parquet) with a column
'completion', such as completions.jsonl of lit-rlhf predict. A row of the file belongs to the prompt
that its 'prompt_index' or its 'prompt' names, else to the one in its place. Nothing is written."""
_EPILOG = """Everything else is read as by fit:

  lit-rlhf rewards try -c recipe.yaml
  lit-rlhf rewards try -c recipe.yaml --completions completions.jsonl --split val"""


@dataclass
class _Sample:
    """A completion to score: its prompt as reward functions see it, and the columns of that prompt."""

    prompt: Any
    completion: Any
    ids: list[int]
    columns: dict[str, Any]


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: What follows ``lit-rlhf rewards try``.
    """
    parser = command_parser("rewards try", _DESCRIPTION, _EPILOG)
    parser.add_argument("--n", type=int, default=8, help="completions (default: 8)")
    parser.add_argument("--per_prompt", type=int, default=1, help="completions sampled per prompt (default: 1)")
    parser.add_argument("--completions", metavar="FILE", help="completions to score, instead of sampling them")
    parser.add_argument("--split", choices=("train", "val", "test"), default="train", help="prompts (default: train)")
    parser.add_argument("--characters", type=int, default=160, help="shown of each text (default: 160)")
    options, rest = parse_beside_recipe(parser, args)
    for name in ("n", "per_prompt", "characters"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    recipe = read_recipe(rest)
    scorer = recipe.data.scorer
    parts = recipe.data.parts(options.split)
    if not parts:
        raise ConfigurationError(f"the recipe has no prompts for {options.split}; name another --split")
    prompts = recipe.data.load_prompts(parts[0], recipe.module.tokenizer)  # the first set stands for the others
    if options.completions is None:
        scorer.check(prompts.columns)
        samples, left = _sampled(recipe, prompts, options.n, options.per_prompt), 0
    else:
        samples, left = _from_file(recipe, prompts, options.completions, options.n)
    columns = {name: [sample.columns.get(name) for sample in samples] for name in samples[0].columns}
    scores = scorer(
        [sample.prompt for sample in samples],
        [sample.completion for sample in samples],
        [sample.ids for sample in samples],
        columns,
    )
    console = Console(highlight=False)
    console.print(_table(scorer, samples, scores, options.characters))
    if left:
        console.print(f"{left} more completions in the file (--n)")
    for line in _summary(scorer, scores):
        console.print(Text(line))
    problems = unreadable_golds(scorer, prompts)
    if problems:
        where, problem = next((prompts.where(row), problem) for row, problem in problems.items())
        console.print(Text(f"{len(problems)} rows cannot be judged, the first: {where}: {problem}"))


def _sampled(recipe: Recipe, prompts: PromptDataset, count: int, per_prompt: int) -> list[_Sample]:
    """Completions of the first prompts by the policy."""
    module, data = recipe.module, recipe.data
    chosen = list(prompts.prompts[: -(-count // per_prompt)])
    module.build_models()
    policy = module.policy
    assert policy is not None
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    sampling = replace(
        data.sampling,
        eos_token_ids=eos_token_ids(module.model_name, module.model_config, module.tokenizer),
        pad_token_id=module.tokenizer.pad_token_id or 0,
    )
    with evaluation_mode(policy):
        rollout = sample_completions(
            policy, data.engine, module.tokenizer, chosen, range(len(chosen)), per_prompt, sampling, data.seed or 0, 0
        )
    lengths = rollout.completion_lengths.tolist()
    ids = [row[:length] for row, length in zip(rollout.completion_ids.tolist(), lengths, strict=True)]
    owners = [prompt for prompt in chosen for _ in range(per_prompt)]
    rows = zip(owners, rollout.completions, ids, strict=True)
    return [_sample(prompt, text, row_ids) for prompt, text, row_ids in rows][:count]


def _from_file(recipe: Recipe, prompts: PromptDataset, path: str, count: int) -> tuple[list[_Sample], int]:
    """Completions of a file, each with the prompt that it belongs to, and how many are left over."""
    rows = read_rows(path)
    by_index = {prompt.index: prompt for prompt in prompts.prompts}
    by_text = {prompt_text(prompt.text): prompt for prompt in prompts.prompts}
    samples = []
    for place, row in enumerate(rows.rows[:count]):
        if "completion" not in row:
            raise DataError(f"{rows.where(place)}: no column 'completion'; columns: {', '.join(row) or 'none'}")
        if "prompt_index" in row:
            prompt = by_index.get(row["prompt_index"])
        elif "prompt" in row:
            prompt = by_text.get(prompt_text(row["prompt"]))
        else:
            prompt = prompts.prompts[place] if place < len(prompts) else None
        if prompt is None:
            raise DataError(f"{rows.where(place)}: {prompts.name} has no prompt for this completion")
        text = completion_text(row["completion"])
        ids = recipe.module.tokenizer(text, add_special_tokens=False)["input_ids"]
        sample = _sample(prompt, text, list(ids))
        # What the file says of a column goes first: a gold may be tried out in it.
        sample.columns.update({name: value for name, value in row.items() if name in prompt.columns})
        samples.append(sample)
    return samples, len(rows) - len(samples)


def _sample(prompt: Prompt, text: str, ids: list[int]) -> _Sample:
    chat = not isinstance(prompt.text, str)
    completion = [{"role": "assistant", "content": text}] if chat else text
    return _Sample(prompt.text, completion, ids, dict(prompt.columns))


def _table(scorer: RewardScorer, samples: Sequence[_Sample], scores: RewardScores, characters: int) -> Table:
    readers = [(name, fn) for name, fn in zip(scorer.names, scorer.functions, strict=True) if hasattr(fn, "extracted")]
    golds = list(dict.fromkeys(name for fn in scorer.functions for name in getattr(fn, "required_columns", ())))
    table = Table(show_lines=True)
    for title in ("", "prompt", "completion", "extracted", "gold"):
        table.add_column(title, overflow="fold")
    for name in (*scorer.names, "total"):
        table.add_column(name, justify="right")
    for row, sample in enumerate(samples):
        found = {name: fn.extracted(sample.completion, **sample.columns) for name, fn in readers}
        given = {name: _field(sample.columns, name) for name in golds}
        numbers = [f"{value:.3g}" if value == value else "-" for value in scores.components[row].tolist()]
        total = f"{scores.total[row].item():.3g}" if scores.scored_mask[row] else "-"
        cells = (
            _end(prompt_text(sample.prompt), characters // 2),
            _end(completion_text(sample.completion), characters),
            _named(found, characters),
            _named(given, characters),
        )
        # As text: a completion like [/INST] is no markup.
        table.add_row(str(row + 1), *map(Text, cells), *numbers, total)
    return table


def _field(columns: dict[str, Any], path: str) -> Any:
    try:
        return column_values({name: [value] for name, value in columns.items()}, path)[0]
    except KeyError:
        return None


def _end(text: str, characters: int) -> str:
    """The end of a text, where its answer is, without what a terminal cannot show."""
    shown = text if len(text) <= characters else f"... {text[-characters:]}"
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown)


def _named(values: dict[str, Any], characters: int) -> str:
    shown = {name: "-" if value is None else _end(str(value), characters) for name, value in values.items()}
    return "\n".join(shown.values() if len(shown) < 2 else (f"{name}: {value}" for name, value in shown.items()))


def _summary(scorer: RewardScorer, scores: RewardScores) -> list[str]:
    lines = []
    count = len(scores.total)
    for place, (name, weight) in enumerate(zip(scorer.names, scorer.weights, strict=True)):
        values = scores.components[:, place]
        there = values[~values.isnan()]
        if not len(there):
            lines.append(f"{name} (weight {weight:g}): no opinion on any of {count} completions")
            continue
        line = f"{name} (weight {weight:g}): mean {there.mean():.3g}, {there.min():.3g} to {there.max():.3g}"
        missing = f", no opinion on {count - len(there)} of {count}" if len(there) < count else ""
        same = f"; the same for all {len(there)}: nothing to learn from here" if len(there.unique()) == 1 else ""
        lines.append(line + missing + (same if len(there) > 1 else ""))
    if scores.extras is not None:
        for place, name in enumerate(scores.extra_names):
            values = scores.extras[:, place]
            if not bool(values.isnan().all()):
                lines.append(f"{name}: mean {values.nanmean():.3g}")
    return lines
