"""``lit-rlhf compare``: several recipes on equal terms, each with several seeds, and a report."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from lit_rlhf.commands.parsing import command_parser
from lit_rlhf.compare import ComparisonRuns, RunState, arm_recipes
from lit_rlhf.errors import ConfigurationError, UsageError, check_number
from lit_rlhf.usage import OneLineParser, check_recipes, nearest

_DESCRIPTION = """Run several arms, such as PPO and GRPO, with several seeds each: the same base model, prompts,
rewards and sampling, until every run has generated the same number of tokens. Then write a report with
intervals over the seeds. A run that is done is not run again, one that was interrupted goes on from its
last checkpoint, one that fails is reported while the others go on."""
_EPILOG = """The file says what is compared; docs/compare.md has its options:

  lit-rlhf compare -c recipes/compare/arithmetic.yaml
  lit-rlhf compare -c recipes/compare/arithmetic.yaml --quick
  lit-rlhf compare -c recipes/compare/arithmetic.yaml --seeds 1 2 --only grpo
  lit-rlhf report checkpoints/runs/compare-arithmetic      # any time, also while it is running"""


def comparison(
    recipe: str | list[str] | dict[str, Any],
    arms: dict[str, str | dict[str, Any] | None],
    token_budget: int,
    out: str,
    seeds: list[int] | None = None,
    quick: bool = False,
    quick_token_budget: int | None = None,
    only: list[str] | None = None,
    may_differ: list[str] | None = None,
    jobs: int | None = None,
    target_accuracy: float | None = None,
) -> None:
    """Run the arms and write the report.

    Args:
        recipe: What all arms share: a recipe of fit, its path, or the paths of recipes to layer.
        arms: What each arm changes, by its name: model, data and trainer as in a recipe, and a title; or the path of a
            recipe.
        token_budget: Completion tokens that each run generates.
        out: Folder of the runs and of the report.
        seeds: Of seed_everything, one run each; 1, 2 and 3 by default.
        quick: A short look: the quick_token_budget, two seeds, and a folder of its own, which ends in -quick.
        quick_token_budget: Completion tokens of each run of a quick comparison; an eighth of token_budget by default.
        only: Names of the arms to run; all by default.
        may_differ: Options that arms may have different values of, though they are not part of an algorithm, such as
            data.init_args.temperature.
        jobs: Runs at a time; on CPUs one per core by default, else one.
        target_accuracy: The report says how many tokens and seconds each arm took to reach it.
    """
    seeds = [1, 2, 3] if seeds is None else seeds
    check_number("token_budget", token_budget, minimum=1)
    if quick:
        token_budget = quick_token_budget or -(-token_budget // 8)
        seeds, out = seeds[:2], f"{out.rstrip('/')}-quick"
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"seeds must be different numbers, at least one, got {seeds}")
    for name in only or []:
        if name not in arms:
            raise ConfigurationError(
                f"only: there is no arm {name!r}{nearest(name, arms)}; there are {', '.join(arms)}"
            )
    made = [arm for arm in arm_recipes(recipe, arms, may_differ or ()) if only is None or arm.name in only]
    on_cpu = all((arm.recipe.get("trainer") or {}).get("accelerator") == "cpu" for arm in made)
    jobs = jobs or ((os.cpu_count() or 1) if on_cpu else 1)
    check_number("jobs", jobs, minimum=1)
    runs = ComparisonRuns(made, seeds, token_budget, out, min(jobs, len(seeds) * len(made)))
    runs.check()
    _run(runs)
    _finish(runs, target_accuracy)


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: What follows ``lit-rlhf compare``.
    """
    parser = command_parser("compare", _DESCRIPTION, _EPILOG)
    parser.add_argument("-c", "--config", metavar="FILE", required=True, help="what to compare")
    parser.add_argument("--out", metavar="DIR", help="folder of the runs and of the report")
    parser.add_argument("--token_budget", type=int, metavar="N", help="completion tokens that each run generates")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="a run of every arm with each")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="arms to run (default: all)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: one per core on CPUs, else 1)")
    parser.add_argument("--target_accuracy", type=float, metavar="A", help="the report says what it took to reach it")
    parser.add_argument("--quick", action="store_true", default=None, help="a short look, into a folder of its own")
    given = {name: value for name, value in vars(parser.parse_args(list(args))).items() if value is not None}
    path = given.pop("config")
    typed = OneLineParser()
    recipes = ("recipe", "arms")  # fit reads them, when they have been layered
    typed.add_function_arguments(comparison, skip=set(recipes))
    names = list(inspect.signature(comparison).parameters)
    check_recipes(["-c", path], names)
    options = {**yaml.safe_load(Path(path).read_text(encoding="utf-8")), **given}
    if missing := [name for name in names[:4] if options.get(name) is None]:
        raise UsageError(f"{path}: {' and '.join(f'{name}:' for name in missing)} missing")
    parsed = typed.parse_object({name: value for name, value in options.items() if name not in recipes})
    comparison(**{name: options[name] for name in recipes}, **parsed.as_dict())


def _run(runs: ComparisonRuns) -> None:
    """Run everything behind a bar of generated tokens."""
    done = [run for run in runs.runs if run.status == "done"]
    total = runs.token_budget * len(runs.runs)
    if done:
        _say(f"{len(done)} of {len(runs.runs)} runs are done already")
    with tqdm(total=total, unit=" tokens", unit_scale=True, dynamic_ncols=True, desc="generated") as bar:

        def show(run: RunState) -> None:
            told = {
                "running": "started",
                "done": f"done: {run.generated_tokens or 0:,} tokens in {run.seconds:.0f} s",
                "failed": f"failed: {run.error}",
                "pending": "stopped, with a checkpoint",
            }
            bar.write(f"{run.arm}, seed {run.seed}: {told[run.status]}", file=sys.stderr)

        def advance() -> None:
            bar.n = sum(
                min(runs.generated(run) if run.status == "running" else run.generated_tokens or 0, runs.token_budget)
                for run in runs.runs
            )
            bar.refresh()

        advance()
        runs.run(show, on_wait=advance)
        advance()


def _finish(runs: ComparisonRuns, target_accuracy: float | None) -> None:
    from lit_rlhf.report import write_report

    failed = [run for run in runs.runs if run.status == "failed"]
    if any(run.status == "done" for run in runs.runs):
        _say(f"report: {write_report(runs.out, target_accuracy)}")
    if failed:
        where = ", ".join(str(Path(runs.out) / run.folder / "console.log") for run in failed)
        raise ConfigurationError(
            f"{len(failed)} of {len(runs.runs)} runs failed; see {where}; run again to try them once more"
        )


def _say(message: str) -> None:
    print(message, file=sys.stderr)  # noqa: T201
