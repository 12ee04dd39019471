"""How far the library, and TRL, are from a bare loop that does the same step: all three in one run, taking turns.

    python benchmarks/floor.py --work small-spread

The floor (``benchmarks/bare``) has no trainer and no options; nothing in it comes from the library. That it computes
what the stock model computes is checked first.
"""

from __future__ import annotations

import os

from gate import output_to
from options import chosen_works, parser
from race import elsewhere, race, require
from report import check_tokens, compare, describe, plot_phases, race_record, raw, save


def main() -> None:
    """Run the works one after the other."""
    options = parser(__doc__.splitlines()[0], default="tiny-spread")
    options.add_argument("--without-trl", action="store_true", help="compare the library with the floor only")
    arguments = options.parse_args()
    works = chosen_works(arguments.work, arguments.quick)
    if any(work.algorithm != "grpo" for work in works.values()):
        raise SystemExit("the floor is a GRPO step; there is none of PPO")
    sides = ["ours", "floor"] if arguments.without_trl else ["trl", "ours", "floor"]
    for side in sides:
        require(side)
    if wrong := elsewhere(_floor_differences):
        raise SystemExit(f"the floor is wrong: {wrong}")
    for name, work in works.items():
        threads = arguments.threads
        print(describe(name, work, threads), flush=True)
        lanes = race(work, {side: {} for side in sides}, arguments.rounds, threads)
        check_tokens(work, lanes)
        print(raw(lanes), *(compare(lanes, side, "floor") for side in sides[:-1]), sep="\n\n", end="\n\n")
        result = f"floor-{name}-{threads}t"
        save(result, race_record(work, threads, lanes))
        plot_phases(result, lanes, f"{name}, {threads} thread{'s' if threads > 1 else ''}")
        floor = lanes["floor"].seconds
        if "trl" in lanes:
            print(f"TRL over the floor: {lanes['trl'].seconds / floor:.2f}x")
            print(f"TRL over lit_rlhf: {lanes['trl'].seconds / lanes['ours'].seconds:.2f}x")
        print(f"lit_rlhf over the floor: {lanes['ours'].seconds / floor:.2f}x", flush=True)


def _floor_differences() -> dict[str, float]:
    from bare.check import differences

    with output_to(os.devnull):
        return differences()


if __name__ == "__main__":
    main()
