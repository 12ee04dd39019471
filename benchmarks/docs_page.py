"""The results in ``docs/performance.md``: tables and plots from the JSON files of the last runs."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from report import PHASES, RESULTS, label

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
PLOTS = ("floor-small-spread-1t", "scaling", "memory")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column flush left."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def races() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and record of each race that was saved, the quick ones left out."""
    for path in sorted(RESULTS.glob("*-[0-9]t.json")):
        if "quick" not in path.name:
            yield (
                path.stem.removeprefix("floor-").removeprefix("vs-trl-").rsplit("-", 1)[0],
                json.loads(path.read_text()),
            )


def load(name: str) -> dict[str, Any] | None:
    """A saved record, if there is one."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def end_to_end() -> str:
    """Every race in a line."""
    rows = []
    for name, record in races():
        sides = record["sides"]
        peer, ours, floor = sides.get("trl") or sides.get("trl-ppo"), sides["ours"], sides.get("floor")
        if peer is None:
            continue
        memory = [side["peak_bytes"] / 2**20 for side in (peer, ours)]
        rows.append(
            [
                name,
                str(record["threads"]),
                f"{peer['seconds']:.1f} ({peer['spread']:.0%})",
                f"{ours['seconds']:.1f} ({ours['spread']:.0%})",
                f"**{peer['seconds'] / ours['seconds']:.1f}x**",
                f"{peer['cpu_seconds'] / ours['cpu_seconds']:.1f}x",
                f"{ours['seconds'] / floor['seconds']:.2f}x" if floor else "",
                f"{peer['seconds'] / floor['seconds']:.1f}x" if floor else "",
                f"{memory[0]:,.0f} -> {memory[1]:,.0f} ({memory[1] / memory[0]:.2f}x)",
            ]
        )
    header = ["work", "threads", "TRL, s", "lit_rlhf, s", "ratio", "of processor seconds", "lit_rlhf / floor"]
    return markdown([*header, "TRL / floor", "peak memory, MiB"], rows)


def peers() -> str:
    """What each version of TRL ran with, where that is not the same in every race."""
    seen: dict[str, list[str]] = {}
    for name, record in races():
        for side, lane in record["sides"].items():
            if side.startswith("trl"):
                size = lane["settings"]["per_device_train_batch_size"]
                seen.setdefault(lane["version"], []).append(f"{size} in `{name}`")
    return "\n".join(f"TRL {version}, micro-batches of {', '.join(sizes)}." for version, sizes in seen.items())


def phases(name: str) -> str:
    """Where the seconds of one race go."""
    record = load(name)
    if record is None:
        return ""
    rows = []
    for side, lane in record["sides"].items():
        seconds = [
            median(sum(step["phases"].get(part, 0.0) for part in parts) for step in lane["steps"])
            for parts in PHASES.values()
        ]
        rows.append([label(side), *(f"{value:.1f}" for value in seconds), f"{lane['seconds']:.1f}"])
    return markdown(["seconds", *PHASES, "whole step"], rows)


def scaling() -> str:
    """Exponents of the sweeps, what a longer prompt costs, and the memory of the log-prob step."""
    record = load("scaling")
    if record is None:
        return ""
    sweeps = {name: found for name, found in record.items() if "exponents" in found}
    rows = [
        [name, f"{found['sizes'][0]:,} to {found['sizes'][-1]:,}", *(f"{e:.2f}" for e in found["exponents"].values())]
        for name, found in sweeps.items()
    ]
    prompts, memory = record["shared prompts"], record["vocabulary"]
    sizes, lengths = memory.pop("sizes"), next(iter(sweeps.values()))["sizes"]
    return "\n\n".join(
        [
            markdown(["exponent of", "from, to", *next(iter(sweeps.values()))["exponents"]], rows),
            f"Prompts {lengths[-1] / lengths[0]:g} times as long add {prompts['seconds']:.2f} s at "
            f"G = {prompts['group']} and {prompts['of_seconds']:.2f} s at G = {prompts['of_group']}.",
            markdown(
                ["log-prob step, MiB; V =", *(f"{size:,}" for size in sizes)],
                [[kind, *(f"{value:,.0f}" for value in values)] for kind, values in memory.items()],
            ),
        ]
    )


def memory() -> str:
    """Peak memory of the variants, and of many iterations."""
    record, leak = load("memory"), load("leak")
    parts = []
    if record is not None:
        variants = record["variants"]
        least = variants["GRPO"]["beyond"]
        rows = [
            [name, f"{row['peak']:,.0f}", f"{row['beyond']:,.0f}", f"{row['beyond'] / least:.2f}x"]
            for name, row in variants.items()
        ]
        parts.append(markdown(["", "peak, MiB", "beyond the libraries", "against GRPO"], rows))
    if leak is not None:
        count = len(leak["resident_mib"])
        parts.append(f"Over {count} iterations resident memory changed by {leak['growth']:+.2%} once it had settled.")
    return "\n\n".join(parts)


def weak_scaling() -> str:
    """Twice the work on two processes against once on one."""
    record = load("weak-scaling")
    if record is None:
        return ""
    works = {name: ways for name, ways in record.items() if name != "machine"}
    rows = [
        [name, *(f"{median(way['seconds']):.2f}" for way in ways.values()), f"{ways['two ranks']['share']:.3f}"]
        for name, ways in works.items()
    ]
    header = ["seconds of a step, each process on a core of its own", *next(iter(works.values())), "of the ideal"]
    return markdown(header, rows)


def main() -> None:
    """Put the results between the page's two marks, and the plots beside it."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=PAGE, help=f"page with the marks (default {PAGE.name} in docs)")
    out = options.parse_args().out
    newest = max(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise SystemExit(f"no results in {RESULTS}: run the benchmarks first")
    about = json.loads(newest.read_text())["machine"]
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers", "lightning"))
    sections = [
        f"Measured {about['date']} on {about['machine']}; Python {about['python']}, {versions}. Medians of the "
        "measured steps; in brackets, how much longer the slowest took than the fastest.",
        end_to_end(),
        peers(),
        "Where the seconds of `small-spread` go, one thread:",
        phases("floor-small-spread-1t"),
        "### Scaling",
        scaling(),
        *(["### Weak scaling", weak_scaling()] if load("weak-scaling") else []),
        "### Memory",
        memory(),
    ]
    plots = out.parent / out.stem
    for name in PLOTS:
        if (RESULTS / f"{name}.png").exists():
            plots.mkdir(exist_ok=True)
            shutil.copy(RESULTS / f"{name}.png", plots)
            sections.append(f"![{name}]({out.stem}/{name}.png)")
    before, rest = out.read_text().split(BEGIN)
    after = rest.split(END)[1]
    out.write_text(before + "\n\n".join([BEGIN, *filter(None, sections), END]) + after)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
