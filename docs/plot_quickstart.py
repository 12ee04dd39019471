"""Draw docs/quickstart_grpo.png from the metrics.csv of a run of the quickstart.

Needs matplotlib, which the package does not depend on::

    python docs/plot_quickstart.py checkpoints/runs/quickstart-grpo/csv/version_0/metrics.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt

PANELS = (
    ("task reward", (("reward", "mean of the rollout"),)),
    ("held-out accuracy", (("val/accuracy", "greedy"), ("val/sampled_accuracy", "sampled"), ("val/pass@8", "pass@8"))),
    ("KL to the reference, nats", (("kl", "sum over a completion"), ("kl/per_token", "per token"))),
    ("groups with differing rewards", (("group/effective_ratio", "share"),)),
)


def column(rows: list[dict[str, str]], name: str) -> tuple[list[int], list[float]]:
    """Optimizer steps taken by the policy that was measured, and its values.

    ``step`` counts the steps done when a row is written. A held-out value is of the policy after them; what an
    iteration of one step logs of its rollout is of the policy before its step.
    """
    chosen = [row for row in rows if row[name]]
    shift = 0 if name.startswith("val/") else 1
    return [int(row["step"]) - shift for row in chosen], [float(row[name]) for row in chosen]


def main() -> None:
    """Parse the options and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="metrics.csv of the run")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "quickstart_grpo.png")
    options = parser.parse_args()
    with options.metrics.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, layout="constrained")
    for axis, (title, lines) in zip(axes.flat, PANELS, strict=True):
        for name, label in lines:
            axis.plot(*column(rows, name), label=label, marker="o" if name.startswith("val/") else None, linewidth=1.4)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        if not title.startswith("KL"):
            axis.set_ylim(0, 1.02)
        if len(lines) > 1:
            axis.legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("optimizer steps taken")
    figure.savefig(options.output, dpi=110)


if __name__ == "__main__":
    main()
