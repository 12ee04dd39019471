"""``lit-rlhf data check``: read all prompts of a recipe as training would, and say what they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lit_rlhf.commands.parsing import command_parser, parse_beside_recipe
from lit_rlhf.commands.recipe import Recipe, read_recipe
from lit_rlhf.data.prompts import PromptDataset
from lit_rlhf.errors import LitRLHFError, RewardError
from lit_rlhf.models.loading import context_length
from lit_rlhf.rollout.checks import check_lengths
from lit_rlhf.rollout.sources import scorers_of, unreadable_golds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_rlhf.rewards.combine import RewardScorer

_DESCRIPTION = """Read all prompts of a recipe with the policy's tokenizer, as fit would, and report: how many there
are, how long they are, what is dropped, cut or refused and why, the columns that reach the rewards,
reference answers that a reward cannot read, and the first prompt as the policy sees it. No model is
loaded and nothing is written. The exit code is 1 if fit would refuse something, else 0."""
_EPILOG = """Everything else is read as by fit:

  lit-rlhf data check -c recipe.yaml
  lit-rlhf data check -c recipe.yaml --data.max_prompt_length 256 --split train"""
_BINS = 10
_BAR = 40  # characters
_SHOWN = 1200  # characters of the first prompt


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: What follows ``lit-rlhf data check``.

    Raises:
        SystemExit: With code 1 where something is refused.
    """
    parser = command_parser("data check", _DESCRIPTION, _EPILOG)
    parser.add_argument("--split", choices=("train", "val", "test"), help="look at this one only")
    parser.add_argument("--rows", type=int, default=10, help="rows listed of each kind of problem (default: 10)")
    options, rest = parse_beside_recipe(parser, args)
    recipe = read_recipe(rest)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    refused = False
    sources = recipe.data.sources
    for split in ("train", "val", "test") if options.split is None else (options.split,):
        if sources[split] is None:
            console.print(f"{split}: none")
        elif split == "test" and options.split is None and sources["test"] is sources["val"]:
            console.print("test: the prompts of val")
        else:
            for part in recipe.data.parts(split):
                refused = _check_part(recipe, part, options.rows, console) or refused
    if refused:
        raise SystemExit(1)


def _check_part(recipe: Recipe, part: str, rows: int, console: Console) -> bool:
    """Report on one data set; whether fit would refuse it."""
    console.print(f"{part}: {_source_name(recipe.data.source_of(part))}")
    try:
        prompts = recipe.data.read_prompts(part, recipe.module.tokenizer)
    except LitRLHFError as error:
        console.print(f"  REFUSED     {error}")
        return True
    split = part.partition("/")[0]
    for line in _report(recipe, split, prompts, rows):
        console.print(f"  {line}")
    refusals = list(_refusals(recipe, split, prompts))
    for refusal in refusals:
        console.print(f"  REFUSED     {refusal}")
    return bool(refusals)


def _report(recipe: Recipe, split: str, prompts: PromptDataset, rows: int) -> Iterable[str]:
    assert prompts.reader is not None
    yield f"rows        {len(prompts.rows)}, prompts from {prompts.reader.source}"
    yield f"prompts     {len(prompts)}"
    if prompts.repeats:
        yield f"repeats     {prompts.repeats} rows repeat an earlier prompt"
        if prompts.contradictions:
            yield f"            {prompts.contradictions} of them with another gold"
    limit = prompts.max_prompt_length
    for what, lengths in (("too long", prompts.overlong), ("cut", prompts.cut)):
        said = {index: f"{length} tokens" for index, length in lengths.items()}
        yield from _listed(f"{what:<11} {len(said)} longer than {limit} tokens", _placed(prompts, said), rows)
    yield from _listed(f"no prompt   {len(prompts.refused)} rows", _placed(prompts, prompts.refused), rows)
    if len(prompts):
        yield from _lengths([len(prompt.ids) for prompt in prompts.prompts])
        yield from _unknown(prompts, recipe.module.tokenizer)
        yield from _columns(prompts)
        for scorer in scorers_of(recipe.data, split):
            with suppress(RewardError):  # a column that is not there is refused below, not row by row
                scorer.check(prompts.columns)
                yield from _unreadable(scorer, prompts, rows)
        yield "the first prompt, with its special tokens:"
        text = str(recipe.module.tokenizer.decode(list(prompts[0].ids)))
        if len(text) > _SHOWN:
            text = f"{text[: _SHOWN // 2]} [...] {text[-_SHOWN // 2 :]}"
        yield from (f"  | {line}" for line in text.split("\n"))


def _refusals(recipe: Recipe, split: str, prompts: PromptDataset) -> Iterable[LitRLHFError]:
    """What fit would raise, all of it."""
    data, module = recipe.data, recipe.module
    checks: list[Callable[[], None]] = [partial(prompts.raise_unusable, data.overlong_prompts, data.bad_prompts)]
    checks += [partial(scorer.check, prompts.columns) for scorer in scorers_of(data, split)]
    if len(prompts):
        context = context_length(module.model_config)
        checks.append(partial(check_lengths, prompts, split, data.sampling.max_new_tokens, context))
    for check in checks:
        try:
            check()
        except LitRLHFError as error:
            yield error


def _unreadable(scorer: RewardScorer, prompts: PromptDataset, rows: int) -> Iterable[str]:
    problems = unreadable_golds(scorer, prompts)
    places = {prompts.where(row): problem for row, problem in problems.items()}
    title = f"unreadable  {len(problems)} rows that {' and '.join(scorer.names)} cannot judge"
    return _listed(title, places, rows)


def _listed(title: str, problems: Mapping[str, str], rows: int) -> Iterable[str]:
    """A title and the first rows with their problems; nothing where there are none."""
    if not problems:
        return
    yield title
    for number, (place, problem) in enumerate(problems.items()):
        if number == rows:
            yield f"            ... and {len(problems) - rows} more (--rows)"
            return
        yield f"            {place}: {problem}"


def _placed(prompts: PromptDataset, problems: Mapping[int, str]) -> dict[str, str]:
    return {prompts.rows.where(index): problem for index, problem in problems.items()}


def _lengths(lengths: list[int]) -> Iterable[str]:
    ordered = sorted(lengths)
    median, high = ordered[len(ordered) // 2], ordered[int(0.95 * (len(ordered) - 1))]
    yield f"tokens      {ordered[0]} to {ordered[-1]}, median {median}, 95 % up to {high}, sum {sum(ordered)}"
    width = max(1, math.ceil((ordered[-1] - ordered[0] + 1) / _BINS))
    counts = Counter((length - ordered[0]) // width for length in lengths)
    most = max(counts.values())
    digits = len(str(ordered[-1]))
    for number in range(max(counts) + 1):
        low = ordered[0] + number * width
        last = min(low + width - 1, ordered[-1])
        bar = "#" * math.ceil(_BAR * counts[number] / most)
        yield f"            {low:>{digits}} to {last:>{digits}} {counts[number]:>7} {bar}".rstrip()


def _unknown(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> Iterable[str]:
    unknown = tokenizer.unk_token_id
    if unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return  # such as GPT-2's, which has one special token for everything
    counts = {place: prompt.ids.count(unknown) for place, prompt in enumerate(prompts.prompts) if unknown in prompt.ids}
    if counts:
        first = next(iter(counts))
        yield (
            f"unknown     {sum(counts.values())} tokens in {len(counts)} prompts are not in the vocabulary, "
            f"the first in {prompts.where(first)}"
        )


def _columns(prompts: PromptDataset) -> Iterable[str]:
    for number, name in enumerate(prompts.columns):
        types = Counter(_type_name(prompt.columns[name]) for prompt in prompts.prompts)
        missing = types.pop("", 0)
        said = ", ".join(f"{kind} ({count})" if len(types) > 1 else kind for kind, count in types.most_common())
        absent = f"missing in {missing} of {len(prompts)}" if missing else ""
        yield f"{'columns' if number == 0 else '':<11} {name}: {'; '.join(part for part in (said, absent) if part)}"


def _type_name(value: Any) -> str:
    """The type in Python's words; empty for a value that is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, list) and value:
        return f"list of {type(value[0]).__name__}"
    return type(value).__name__


def _source_name(source: Any) -> str:
    name = getattr(source, "name", None)
    return name if isinstance(name, str) and name else str(source) if isinstance(source, str) else repr(source)[:80]
