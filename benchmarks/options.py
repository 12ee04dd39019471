"""Options that the benchmarks share."""

from __future__ import annotations

import argparse

from workload import WORKS, Work


def parser(description: str, default: str | None = None) -> argparse.ArgumentParser:
    """Threads, rounds and ``--quick``; and the work, where there is a choice of it.

    Args:
        description: Of the benchmark.
        default: Work that is run where none is named.
    """
    options = argparse.ArgumentParser(description=description)
    if default is not None:
        known = ", ".join(WORKS)
        options.add_argument("--work", default=default, help=f"any of {known}; several with commas (default {default})")
    options.add_argument("--threads", type=int, default=1, help="of each side (default 1)")
    options.add_argument("--rounds", type=int, default=3, help="measured steps of each side (default 3)")
    options.add_argument("--quick", action="store_true", help="smaller models and shorter texts: one or two minutes")
    return options


def chosen_works(names: str, quick: bool) -> dict[str, Work]:
    """The works of a comma-separated list, scaled down where that is asked for."""
    chosen = names.split(",")
    if unknown := [name for name in chosen if name not in WORKS]:
        raise SystemExit(f"no such work: {', '.join(unknown)}; there are {', '.join(WORKS)}")
    if quick:
        return {f"{name}-quick": WORKS[name].smaller() for name in chosen}
    return {name: WORKS[name] for name in chosen}
