"""What an iteration costs as prompts, completions, groups, batches and models grow: seconds by phase, and exponents.

    python benchmarks/scaling.py

An exponent of 1 is proportional cost. Two further tables answer what the exponents leave open: what a longer prompt
costs its G completions together, against what it costs one, and how much memory the log-prob step needs as the
vocabulary grows.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gate import Alone, Finished, output_to
from log_prob_memory import Kind, log_prob_bytes
from options import parser
from race import Lane, require
from report import PHASES, finish, pyplot, save, table
from workload import Work

BASE = Work("tiny", "full", prompts=2, group=8, prompt_tokens=(128, 128), new_tokens=64)
# Along each axis the sizes, smallest first, and the work of a size.
SWEEPS: dict[str, tuple[Sequence[Any], Callable[[Any], Work]]] = {
    "prompt length P": (
        (64, 128, 256, 512),
        lambda size: replace(BASE, group=16, prompt_tokens=(size, size), new_tokens=32),
    ),
    "completion length T": ((32, 64, 128, 256), lambda size: replace(BASE, new_tokens=size)),
    "group size G": ((4, 8, 16, 32), lambda size: replace(BASE, group=size)),
    "prompts B": ((1, 2, 4, 8), lambda size: replace(BASE, prompts=size)),
    "model parameters": (("mini", "tiny", "small"), lambda name: replace(BASE, model=name, vocabulary=259)),
}
VOCABULARIES = (4_096, 16_384, 65_536, 131_072)


def measure(work: Work, steps: int, threads: int) -> Lane:
    """Run a work in this process."""
    import ours

    alone = Alone(steps)
    with output_to(os.devnull), contextlib.suppress(Finished):
        ours.run(alone, work, threads)
    return Lane("ours", **alone.hello, steps=alone.steps)


def parameters(work: Work) -> int:
    """Of the policy's layers: what the work of a token is proportional to."""
    shape = work.shape
    return shape.layers * shape.hidden * (4 * shape.hidden + 3 * shape.intermediate)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of a straight line through the logarithms."""
    points = [(math.log(size), math.log(max(second, 1e-9))) for size, second in zip(sizes, seconds, strict=True)]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return rise / sum((x - mean_x) ** 2 for x, _ in points)


def sweep(name: str, points: Sequence[tuple[Any, Work]], steps: int, threads: int) -> dict[str, Any]:
    """Seconds of each phase along one axis, and their exponents."""
    sizes = [parameters(work) if isinstance(size, str) else size for size, work in points]
    columns: dict[str, list[float]] = {phase: [] for phase in [*PHASES, "whole step"]}
    for _, work in points:
        measured = measure(work, steps, threads)
        for phase, parts in PHASES.items():
            columns[phase].append(measured.phase(*parts))
        columns["whole step"].append(measured.seconds)
    slopes = {phase: exponent(sizes, seconds) for phase, seconds in columns.items()}
    header = [name, *(f"{size:,.0f}" for size in sizes), "exponent"]
    rows = [[f"{p}, s", *(f"{s:.3f}" for s in columns[p]), f"{slopes[p]:.2f}"] for p in columns]
    print(table([header, *rows]), end="\n\n", flush=True)
    return {"sizes": sizes, "seconds": columns, "exponents": slopes}


def shared_prompts(points: Sequence[tuple[int, Work]], steps: int, threads: int) -> dict[str, float]:
    """Seconds that the longest prompt adds to the shortest, for G completions and for two."""
    added, tokens = {}, points[-1][0] - points[0][0]
    for group in (points[0][1].group, 2):
        short, long = (
            measure(replace(work, group=group), steps, threads).seconds for work in (points[0][1], points[-1][1])
        )
        added[group] = long - short
    many, few = added.values()
    groups = list(added)
    print(
        f"{tokens} more tokens in every prompt add {many:.3f} s at G = {groups[0]} and {few:.3f} s at G = {groups[1]}, "
        f"with {groups[0] / groups[1]:.0f} times fewer completions\n",
        flush=True,
    )
    return {"group": groups[0], "seconds": many, "of_group": groups[1], "of_seconds": few}


def vocabulary_sweep(sizes: Sequence[int]) -> dict[str, list[float]]:
    """MiB of the log-prob step, forward and backward, beyond weights and gradients."""
    kinds: tuple[Kind, ...] = ("chunked, nothing kept", "chunked", "plain")
    found: dict[str, list[float]] = {kind: [log_prob_bytes(size, kind) / 2**20 for size in sizes] for kind in kinds}
    header = ["memory of the log-prob step, MiB; V =", *(f"{size:,}" for size in sizes)]
    print(table([header, *([kind, *(f"{value:.0f}" for value in found[kind])] for kind in found)]), end="\n\n")
    return {"sizes": list(sizes), **found}


def plot(record: dict[str, Any], name: str) -> None:
    """A panel per sweep, and one for the vocabulary, on logarithmic axes."""
    figure, grid = pyplot().subplots(2, 3, figsize=(11, 6), layout="constrained")
    *panels, last = grid.flat
    for axes, axis in zip(panels, SWEEPS, strict=True):
        found = record[axis]
        for phase, seconds in found["seconds"].items():
            style = {"color": "black", "linewidth": 2} if phase == "whole step" else {}
            axes.loglog(found["sizes"], seconds, marker=".", label=phase, **style)
        axes.set_title(f"{axis}: exponent {found['exponents']['whole step']:.2f}", fontsize="medium")
        axes.set_ylabel("seconds per iteration", fontsize="small")
        _name_sizes(axes, found["sizes"])
    memory = dict(record["vocabulary"])
    sizes = memory.pop("sizes")
    for kind, mebibytes in memory.items():
        last.loglog(sizes, mebibytes, marker=".", label=kind)
    last.set_title("MiB of the log-prob step over vocabulary V", fontsize="medium")
    last.legend(fontsize="small")
    _name_sizes(last, sizes)
    figure.legend(*panels[0].get_legend_handles_labels(), ncols=6, loc="outside lower center", fontsize="small")
    finish(figure, name)


def _name_sizes(axes: Any, sizes: Sequence[float]) -> None:
    """Label the measured sizes, and no others."""
    axes.set_xticks(sizes, [f"{size / 1e6:.1f} M" if size >= 1e6 else f"{size:,.0f}" for size in sizes])
    axes.minorticks_off()


def main() -> None:
    """Measure, print, save, plot."""
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    require("ours")
    steps, threads = 1 if arguments.quick else arguments.rounds, arguments.threads
    taken = slice(3) if arguments.quick else slice(None)
    sweeps = {name: [(size, work(size)) for size in sizes[taken]] for name, (sizes, work) in SWEEPS.items()}
    if arguments.quick:
        sweeps["model parameters"].pop()
    record: dict[str, Any] = {name: sweep(name, points, steps, threads) for name, points in sweeps.items()}
    result = "scaling-quick" if arguments.quick else "scaling"
    record["shared prompts"] = shared_prompts(sweeps["prompt length P"], steps, threads)
    record["vocabulary"] = vocabulary_sweep(list(VOCABULARIES)[taken])
    save(result, record)
    plot(record, result)


if __name__ == "__main__":
    main()
