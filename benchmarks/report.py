"""What a race says: a table, the raw numbers, a JSON file and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from race import Lane, machine
from workload import Work

RESULTS = Path(__file__).parent / "results"
PHASES = {
    "generation": ("generation",),
    "reference, scores": ("reference",),
    "policy forward": ("forward",),
    "backward": ("backward",),
    "optimizer, rest": ("optimizer", "rest"),
}
LABELS = {"trl": "TRL", "trl-ppo": "TRL", "ours": "lit_rlhf", "floor": "floor"}


def label(side: str) -> str:
    """Name of a side as it is printed."""
    return LABELS.get(side, side)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first one flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def describe(name: str, work: Work, threads: int) -> str:
    """One line about the work."""
    shortest, longest = work.prompt_tokens
    prompts = f"{shortest}" if shortest == longest else f"{shortest}-{longest}"
    shape = work.shape
    return (
        f"{name}: {work.algorithm.upper()}, {work.prompts} prompts x {work.group}, prompts of {prompts} tokens, at "
        f"most {work.new_tokens} new ({work.lengths}), KL coefficient {work.kl_coef:g}; Llama of {shape.layers} layers "
        f"x {shape.hidden}, V = {shape.vocabulary}, float32; {threads} thread{'s' if threads > 1 else ''} each"
    )


def compare(lanes: dict[str, Lane], base: str, other: str) -> str:
    """Two sides beside each other, by phase, and how many times faster the second one is."""
    one, two = lanes[base], lanes[other]
    rows = [["", label(base), label(other), "ratio"]]

    def add(name: str, first: float, second: float, digits: int, flip: bool = False) -> None:
        numerator, denominator = (second, first) if flip else (first, second)
        ratio = f"{numerator / denominator:.2f}x" if denominator > 0 else ""
        rows.append([name, f"{first:,.{digits}f}", f"{second:,.{digits}f}", ratio])

    for name, parts in PHASES.items():
        add(f"{name}, s", one.phase(*parts), two.phase(*parts), 2)
    add("whole step, s", one.seconds, two.seconds, 2)
    add("processor, s", one.cpu_seconds, two.cpu_seconds, 2)
    add("slowest over fastest step", 1 + one.spread, 1 + two.spread, 2)
    rows[-1][-1] = ""
    training = [lane.seconds - lane.phase("generation", "reference") for lane in (one, two)]
    generating = [lane.phase("generation") for lane in (one, two)]
    for kind, (first, second) in {"generated": generating, "trained": training}.items():
        add(f"{kind} tokens / s", one.tokens[kind] / first, two.tokens[kind] / second, 0, flip=True)
    add("peak memory, MiB", one.peak_bytes / 2**20, two.peak_bytes / 2**20, 0)
    add("of it before a model is loaded", one.empty_bytes / 2**20, two.empty_bytes / 2**20, 0)
    rows[-1][-1] = ""
    add("generated tokens", one.tokens["generated"], two.tokens["generated"], 0)
    add("trained tokens", one.tokens["trained"], two.tokens["trained"], 0)
    return table(rows)


def raw(lanes: dict[str, Lane]) -> str:
    """Settings and seconds of each side."""
    lines = []
    for side, lane in lanes.items():
        settings = ", ".join(f"{name}={value}" for name, value in lane.settings.items())
        lines.append(f"{label(side)} {lane.version}: {settings}")
        lines.append(f"  seconds by step: {' '.join(f'{step.seconds:.2f}' for step in lane.steps)}")
    return "\n".join(lines)


def check_tokens(work: Work, lanes: dict[str, Lane]) -> None:
    """Stop where a side did other work than it was given."""
    for side, lane in lanes.items():
        if any(step.tokens != work.tokens() for step in lane.steps):
            raise SystemExit(f"{label(side)} did other work than the others: {lane.tokens}, wanted {work.tokens()}")


def save(name: str, record: dict[str, Any]) -> Path:
    """Write a result with the machine it comes from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **record}, indent=1))
    return path


def race_record(work: Work, threads: int, lanes: dict[str, Lane]) -> dict[str, Any]:
    """A race for a JSON file."""
    sides = {side: lane.record() for side, lane in lanes.items()}
    return {"work": asdict(work), "threads": threads, "sides": sides}


def plot_phases(name: str, lanes: dict[str, Lane], title: str) -> Path:
    """Stacked bars, one per side."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.6 * len(lanes)), layout="constrained")
    sides = list(lanes)[::-1]
    left = [0.0] * len(sides)
    for phase, parts in PHASES.items():
        seconds = [lanes[side].phase(*parts) for side in sides]
        axes.barh([label(side) for side in sides], seconds, left=left, label=phase)
        left = [start + width for start, width in zip(left, seconds, strict=True)]
    axes.set_xlabel("seconds per step")
    axes.set_title(title, fontsize="medium")
    axes.legend(fontsize="small", ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.45, -0.35), frameon=False)
    return finish(figure, name)


def pyplot() -> Any:
    """matplotlib, drawing to files."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit('matplotlib is not installed here: pip install -e ".[bench]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def finish(figure: Any, name: str) -> Path:
    """Write a plot beside the results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=150)
    return path
