"""Resident memory over many iterations: it must not grow.

    python benchmarks/leak.py

What could keep things is on: a TensorBoard logger, and callbacks that collect samples and distributions.
"""

from __future__ import annotations

from options import parser
from race import race, require
from report import save, table
from workload import Work

WORK = Work("mini", prompts=4, group=4, prompt_tokens=(16, 32), new_tokens=32)
CALLBACKS = ("SampleTable", "Distributions", "Throughput", "HealthMonitor")
ALLOWED_GROWTH = 0.01
SETTLED = 0.25  # share of the run after which allocators and caches have found their size


def main() -> None:
    """Measure, print, save; fail on growth."""
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=200)
    arguments = options.parse_args()
    require("ours")
    rounds = 40 if arguments.quick else arguments.rounds
    lane = race(WORK, {"ours": {"callbacks": CALLBACKS, "logger": True}}, rounds, arguments.threads)["ours"]
    resident = [step.resident_bytes / 2**20 for step in lane.steps]
    settled = round(rounds * SETTLED)
    shown = sorted({0, settled, rounds // 2, rounds * 3 // 4, rounds - 1})
    rows = [["iteration", *(str(number + 1) for number in shown)]]
    rows.append(["resident, MiB", *(f"{resident[number]:,.1f}" for number in shown)])
    print(table(rows))
    growth = resident[-1] / resident[settled] - 1
    save("leak-quick" if arguments.quick else "leak", {"resident_mib": resident, "growth": growth})
    print(f"from iteration {settled + 1} to {rounds}: {growth:+.2%}")
    if growth > ALLOWED_GROWTH:
        raise SystemExit(f"memory grows: more than {ALLOWED_GROWTH:.0%}")


if __name__ == "__main__":
    main()
