"""Commands of ``lit-rlhf`` besides Lightning's own; each is a module with ``main(args)``, imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

COMMANDS = {
    "compare": ("lit_rlhf.commands.compare", "run several recipes on equal terms and report which is better"),
    "data check": ("lit_rlhf.commands.data_check", "read, render and count all prompts of a recipe"),
    "export": ("lit_rlhf.commands.export", "write a checkpoint's policy as a Hugging Face folder, or its adapter"),
    "plan": ("lit_rlhf.commands.plan", "reckon what a recipe takes of each device's memory"),
    "report": ("lit_rlhf.commands.report", "make a page of what a run or a comparison has shown"),
    "rewards try": ("lit_rlhf.commands.rewards_try", "score sample completions with the rewards of a recipe"),
}
"""Name on the command line: the module, and what it does in a few words."""


def find_command(args: Sequence[str]) -> Callable[[], None] | None:
    """The command that a command line names, ready to be called; ``None`` if it is one of LightningCLI's.

    Args:
        args: Everything after ``lit-rlhf``.
    """
    for name, (module, _) in COMMANDS.items():
        words = name.split()
        if list(args[: len(words)]) == words:
            rest = list(args[len(words) :])
            return lambda: import_module(module).main(rest)
    first_words = {name.split()[0] for name in COMMANDS}
    return _list_commands if args and args[0] in first_words else None


def _list_commands() -> None:
    """Say what goes on after a first word such as ``data``."""
    import sys

    lines = [f"  lit-rlhf {name:<14} {summary}" for name, (_, summary) in COMMANDS.items()]
    print("The commands besides Lightning's own; --help after each explains it:", *lines, sep="\n", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)
