"""Write GSM8K as chat prompts, for the recipes in ``recipes/grpo`` and ``recipes/ppo``.

    python recipes/grpo/make_gsm8k.py                   # downloads openai/gsm8k with Hugging Face datasets
    python recipes/grpo/make_gsm8k.py --source FOLDER   # or reads train.jsonl and test.jsonl from a folder

Into ``recipes/grpo/data`` go ``gsm8k_train.jsonl``, ``gsm8k_val.jsonl`` (the last 512 of the 7,473 training problems)
and ``gsm8k_test.jsonl`` (the 1,319 test problems). The columns are GSM8K's own: ``question``, here one user message
with an instruction behind the problem, and ``answer``, the worked solution that ends in ``#### 18``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from lit_rlhf.data.rows import read_rows

INSTRUCTION = 'Think step by step, and give the final number after "####".'


def problems(source: Path | None, split: str) -> list[Mapping[str, str]]:
    """The rows of one split."""
    if source is not None:
        return read_rows(source / f"{split}.jsonl").rows
    from datasets import load_dataset

    return list(load_dataset("openai/gsm8k", "main", split=split))


def write(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write one JSON object per line."""
    lines = []
    for row in rows:
        message = {"role": "user", "content": f"{row['question']} {INSTRUCTION}"}
        lines.append(json.dumps({"question": [message], "answer": row["answer"]}, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{path}: {len(lines)} rows")


def main() -> None:
    """Parse the options and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="folder with train.jsonl and test.jsonl; none downloads")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--val", type=int, default=512, help="training problems to hold out")
    options = parser.parse_args()
    train, test = problems(options.source, "train"), problems(options.source, "test")
    if not 0 < options.val < len(train):
        parser.error(f"--val must lie between 1 and {len(train) - 1}, got {options.val}")

    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder / "gsm8k_train.jsonl", train[: -options.val])
    write(options.folder / "gsm8k_val.jsonl", train[-options.val :])
    write(options.folder / "gsm8k_test.jsonl", test)


if __name__ == "__main__":
    main()
