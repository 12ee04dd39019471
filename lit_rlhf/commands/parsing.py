"""What the command lines of all commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def command_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser whose help shows both texts as they are written, and that takes no option by its beginning alone.

    Args:
        name: Of the command, without ``lit-rlhf``.
        description: Above the options.
        epilog: Below them.
    """
    return argparse.ArgumentParser(
        f"lit-rlhf {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_beside_recipe(parser: argparse.ArgumentParser, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """A command's own options, and the others, which name the recipe as for ``fit``.

    Args:
        parser: With the command's own options.
        args: What follows the command.

    Raises:
        SystemExit: With code 2 where no recipe is named.
    """
    options, rest = parser.parse_known_args(args)
    if not rest:
        parser.error(f"name a recipe: {parser.prog} -c recipe.yaml")
    return options, rest
