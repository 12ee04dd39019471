"""``lit-rlhf report``: what a run or a comparison has shown, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lit_rlhf.commands.parsing import command_parser
from lit_rlhf.report import write_report

_DESCRIPTION = """Make a report of what was logged: a verdict in plain words, learning curves, tables with intervals,
completions side by side and the alarms that rang. DIR is the folder of a run (what fit leaves: metrics.csv or
TensorBoard's events, and beside them config.yaml, health.jsonl, samples/ and evaluation/) or that of a
comparison (with comparison.json). It works at any time, also while runs are going on or where some have
failed, and changes nothing of theirs. It writes report.html, which needs no other file and no network,
report.md, and report.json with every number and the files that it is made of."""
_EPILOG = """A difference is claimed only where its 95 % interval over seeds excludes 0. docs/report.md explains
the rest.

  lit-rlhf report checkpoints/runs/quickstart-grpo
  lit-rlhf report checkpoints/runs/comparison --target_accuracy 0.9 --out /tmp/report"""


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: What follows ``lit-rlhf report``.

    Raises:
        ConfigurationError: There is no run in the folder, or matplotlib is not installed.
        DataError: What is there cannot be read.
        OutputError: The report cannot be written.
    """
    parser = command_parser("report", _DESCRIPTION, _EPILOG)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a run or of a comparison")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the report (default: DIR)")
    parser.add_argument(
        "--target_accuracy",
        type=float,
        metavar="SHARE",
        help="report the tokens and seconds it took to reach this held-out accuracy, such as 0.9 "
        "(default: the highest that all runs have reached)",
    )
    options = parser.parse_args(args)
    path = write_report(options.folder, options.target_accuracy, options.out)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"report written to {path}, {path.with_suffix('.md').name} and {path.with_suffix('.json').name}")
