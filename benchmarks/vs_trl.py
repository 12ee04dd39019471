"""Our training step against TRL's, in one run, taking turns: the same weights, prompts, lengths, loss and steps.

    python benchmarks/vs_trl.py --work small-spread --threads 1

GRPO needs TRL 1.16, PPO (``--work ppo-spread``) TRL 1.12, the last version that has it.
"""

from __future__ import annotations

from options import chosen_works, parser
from race import race, require
from report import check_tokens, compare, describe, plot_phases, race_record, raw, save
from workload import Work

MICRO_BATCHES = (64, 32, 16, 8)


def peer_of(work: Work) -> str:
    """The side that TRL is in this work."""
    return "trl" if work.algorithm == "grpo" else "trl-ppo"


def best_micro_batch(work: Work, threads: int) -> int:
    """The peer's fastest micro-batch size, each tried for two steps."""
    seconds = {}
    for size in MICRO_BATCHES:
        if work.rows % size == 0:
            peer = peer_of(work)
            lane = race(work, {peer: {"micro_batch": size}}, rounds=1, threads=threads)[peer]
            seconds[size] = lane.seconds
            print(f"  micro-batches of {size}: {lane.seconds:.2f} s, {lane.peak_bytes / 2**20:,.0f} MiB", flush=True)
    return min(seconds, key=seconds.__getitem__)


def main() -> None:
    """Run the works one after the other."""
    options = parser(__doc__.splitlines()[0], default="tiny-spread")
    options.add_argument("--search", action="store_true", help="first find the peer's fastest micro-batch size anew")
    arguments = options.parse_args()
    works = chosen_works(arguments.work, arguments.quick)
    for work in works.values():
        for side in (peer_of(work), "ours"):
            require(side)
    for name, work in works.items():
        peer, threads = peer_of(work), arguments.threads
        print(describe(name, work, threads), flush=True)
        sides: dict[str, dict[str, int]] = {peer: {}, "ours": {}}
        if arguments.search:
            sides[peer]["micro_batch"] = best_micro_batch(work, threads)
        lanes = race(work, sides, arguments.rounds, threads)
        check_tokens(work, lanes)
        print(raw(lanes), compare(lanes, peer, "ours"), sep="\n\n", end="\n\n")
        ratio = lanes[peer].seconds / lanes["ours"].seconds
        result = f"vs-trl-{name}-{threads}t"
        save(result, race_record(work, threads, lanes))
        plot_phases(result, lanes, f"{name}, {threads} thread{'s' if threads > 1 else ''}: {ratio:.1f}x")
        print(f"end to end: {ratio:.1f}x", flush=True)


if __name__ == "__main__":
    main()
