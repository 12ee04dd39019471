"""Peak memory of one training step: GRPO against PPO, all weights against low-rank adapters.

    python benchmarks/memory.py

Each variant runs in a process of its own, on the same prompts, lengths and rule reward. ``beyond the libraries`` leaves
out what Python and its libraries take before a model is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from options import parser
from race import race, require
from report import describe, finish, pyplot, save, table
from workload import Work

WORK = Work("small", prompts=8, group=8)
ADAPTER = {"lora_rank": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("grpo", {}),
    "GRPO without KL": ("grpo", {"kl_coef": 0.0}),
    "GRPO, adapter": ("grpo", ADAPTER),
    "PPO, critic of its own": ("ppo", {"critic": "own"}),
    "PPO, shared backbone": ("ppo", {"critic": "shared"}),
    "PPO, adapter, critic of its own": ("ppo", {"critic": "own", **ADAPTER}),
    "PPO, adapter, critic on an adapter": ("ppo", {"critic": "adapter", **ADAPTER}),
}


def main() -> None:
    """Measure, print, save, plot."""
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    require("ours")
    work = WORK.smaller() if arguments.quick else WORK
    print(describe("memory", work, arguments.threads), flush=True)
    found: dict[str, dict[str, float]] = {}
    for name, (algorithm, options) in VARIANTS.items():
        side = replace(work, algorithm=algorithm)  # type: ignore[arg-type]
        lane = race(side, {"ours": {"module": options}}, rounds=1, threads=arguments.threads)["ours"]
        beyond = lane.peak_bytes - lane.empty_bytes
        found[name] = {"peak": lane.peak_bytes / 2**20, "beyond": beyond / 2**20, "seconds": lane.seconds}
    least = found["GRPO"]["beyond"]
    rows = [["", "peak, MiB", "beyond the libraries", "against GRPO", "seconds"]]
    for name, row in found.items():
        ratio = f"{row['beyond'] / least:.2f}x"
        rows.append([name, f"{row['peak']:,.0f}", f"{row['beyond']:,.0f}", ratio, f"{row['seconds']:.2f}"])
    print(table(rows))
    saved = 1 - least / found["PPO, critic of its own"]["beyond"]
    print(f"GRPO needs {saved:.0%} less than PPO with a critic of its own")
    result = "memory-quick" if arguments.quick else "memory"
    save(result, {"variants": found})
    plot(found, result)


def plot(found: dict[str, dict[str, float]], name: str) -> None:
    """A bar per variant."""
    figure, axes = pyplot().subplots(figsize=(7, 3), layout="constrained")
    axes.barh(list(found)[::-1], [row["beyond"] for row in found.values()][::-1])
    axes.set_xlabel("peak memory beyond the libraries, MiB")
    finish(figure, name)


if __name__ == "__main__":
    main()
