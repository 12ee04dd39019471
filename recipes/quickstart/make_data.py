"""Write the quickstart's data: sums of two numbers below 100, and the homework of a pupil who forgets to carry.

    python recipes/quickstart/make_data.py

Into ``recipes/quickstart/data`` go

* ``corpus.jsonl``, the homework that the base model learns from (``prompt``, ``completion``): where the units add up to
  ten or more, the carry into the tens is forgotten in 70 % of the rows. Each sum is there several times, each time
  drawn anew, so that the mistakes cannot be learned by heart;
* ``corpus_val.jsonl``, the same pupil's homework on the sums of ``val.jsonl``, to validate the base model with;
* ``train.jsonl``, prompts for reinforcement learning (``prompt``, ``answer``), four fifths of them with a carry;
* ``val.jsonl`` and ``test.jsonl``, held out (``prompt``, ``answer``), 45 % with a carry, as of all sums.

Two numbers that are added in ``val.jsonl`` or ``test.jsonl`` are added nowhere else, in either order. The files depend
on the options alone: the same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LARGEST = 99


def carries(a: int, b: int) -> bool:
    """Whether the units of the two numbers add up to ten or more."""
    return a % 10 + b % 10 >= 10


def homework(a: int, b: int, forget: float, rng: random.Random) -> int:
    """The pupil's answer to ``a + b``."""
    forgotten = carries(a, b) and rng.random() < forget
    return a + b - 10 if forgotten else a + b


def held_out(count: int, taken: set[frozenset[int]], rng: random.Random) -> list[tuple[int, int]]:
    """Draw ``count`` sums whose pair of numbers is not yet taken, and take them; 45 % have a carry, as of all sums."""
    room = {True: round(0.45 * count), False: count - round(0.45 * count)}
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
        if frozenset((a, b)) not in taken and room[carries(a, b)] > 0:
            room[carries(a, b)] -= 1
            taken.add(frozenset((a, b)))
            pairs.append((a, b))
    return pairs


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    """Parse the options and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forget", type=float, default=0.7, help="share of carries that the pupil forgets")
    parser.add_argument("--draws", type=int, default=12, help="how often each sum occurs in the homework")
    parser.add_argument("--train", type=int, default=2000, help="rows of train.jsonl, four fifths with a carry")
    parser.add_argument("--val", type=int, default=256, help="rows of val.jsonl")
    parser.add_argument("--test", type=int, default=512, help="rows of test.jsonl")
    options = parser.parse_args()
    rng = random.Random(options.seed)

    taken: set[frozenset[int]] = set()
    val = held_out(options.val, taken, rng)
    test = held_out(options.test, taken, rng)
    seen = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1) if frozenset((a, b)) not in taken]

    with_carry = options.train * 4 // 5
    train = rng.sample([pair for pair in seen if carries(*pair)], with_carry)
    train += rng.sample([pair for pair in seen if not carries(*pair)], options.train - with_carry)
    rng.shuffle(train)

    corpus = [pair for pair in seen for _ in range(options.draws)]
    rng.shuffle(corpus)

    val_corpus = [pair for pair in val for _ in range(options.draws)]

    options.folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("corpus", corpus), ("corpus_val", val_corpus)):
        rows = [{"prompt": f"{a}+{b}=", "completion": str(homework(a, b, options.forget, rng))} for a, b in pairs]
        write(options.folder / f"{name}.jsonl", rows)
    for name, pairs in (("train", train), ("val", val), ("test", test)):
        write(options.folder / f"{name}.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


if __name__ == "__main__":
    main()
