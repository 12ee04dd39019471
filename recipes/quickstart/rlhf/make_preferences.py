"""Write preference pairs over the quickstart's sums: the right sum was preferred to a wrong number.

    python recipes/quickstart/rlhf/make_preferences.py

Into ``recipes/quickstart/rlhf/data`` go ``preferences.jsonl`` and, over the sums of ``val.jsonl``,
``preferences_val.jsonl`` (``prompt``, ``chosen``, ``rejected``). Each sum is there three times: against the answer of a
pupil who gets the carry wrong (forgotten where there is one, added where there is none), against an answer with a wrong
last digit, and against another wrong number: a digit changed, left out or doubled, or any number at all. No sum of
``val.jsonl`` or ``test.jsonl`` is in ``preferences.jsonl``, in either order. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LARGEST = 99
QUICKSTART = Path(__file__).parents[1] / "data"


def read_sums(path: Path) -> list[tuple[int, int]]:
    """The pairs of numbers that a file's prompts add."""
    prompts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [(int(a), int(b)) for a, b in (prompt.rstrip("=").split("+") for prompt in prompts)]


def wrong_carry(a: int, b: int) -> str:
    """The sum with the carry from the units forgotten, or with one that is not due."""
    return str(a + b - 10 if a % 10 + b % 10 >= 10 else a + b + 10)


def wrong_last_digit(right: str, rng: random.Random) -> str:
    """The sum with another last digit, which in half of the cases is its neighbour."""
    digit = int(right[-1])
    steps = [step for step in (-1, 1) if 0 <= digit + step <= 9] if rng.random() < 0.5 else range(-digit, 10 - digit)
    return right[:-1] + str(digit + rng.choice([step for step in steps if step]))


def another_number(right: str, rng: random.Random) -> str:
    """A wrong number: one digit changed, left out or doubled, or a new number."""
    while True:
        place, kind = rng.randrange(len(right)), rng.random()
        if kind < 0.6:
            wrong = right[:place] + str(rng.randrange(10)) + right[place + 1 :]
        elif kind < 0.7:
            wrong = right[:place] + right[place + 1 :]
        elif kind < 0.8:
            wrong = right[: place + 1] + right[place:]
        else:
            wrong = str(rng.randrange(2 * LARGEST + 1))
        if wrong and wrong != right:
            return wrong


def pairs(sums: list[tuple[int, int]], rng: random.Random) -> list[dict[str, str]]:
    """Three rows for each sum."""
    rows = []
    for a, b in sums:
        right = str(a + b)
        for rejected in (wrong_carry(a, b), wrong_last_digit(right, rng), another_number(right, rng)):
            rows.append({"prompt": f"{a}+{b}=", "chosen": right, "rejected": rejected})
    return rows


def main() -> None:
    """Parse the options and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)

    val = read_sums(QUICKSTART / "val.jsonl")
    taken = {frozenset(pair) for pair in val + read_sums(QUICKSTART / "test.jsonl")}
    everything = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, sums in (
        ("preferences_val", val),
        ("preferences", [pair for pair in everything if frozenset(pair) not in taken]),
    ):
        rows = pairs(sums, rng)
        path = options.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
