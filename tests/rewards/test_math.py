from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest

from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import MathAnswer
from lit_rlhf.rewards.arithmetic import TooLargeError, evaluate
from lit_rlhf.rewards.comparison import may_explode
from lit_rlhf.rewards.extraction import extract_answer
from lit_rlhf.rewards.math import _pool
from lit_rlhf.rewards.reading import read

CASES = [json.loads(line) for line in (Path(__file__).parent / "answer_cases.jsonl").read_text("utf8").splitlines()]
TOWER = r"\boxed{5^{5^{5^{5}}}}"
# Passes the check for huge powers, and does not end within any reasonable time.
ENDLESS = r"\boxed{\binom{1000000000}{500000000}}"


def score(completion: object, gold: object, **options: float) -> float | None:
    return MathAnswer(**options)(completions=[completion], answer=[gold])[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_answer_case(case: dict) -> None:
    assert score(case["completion"], case["gold"]) == case["expected"], case["why"]


@pytest.mark.parametrize("case", CASES[:40], ids=lambda case: case["id"])
def test_a_chat_completion_scores_like_its_text(case: dict) -> None:
    chat = [{"role": "assistant", "content": case["completion"]}]
    assert score(chat, case["gold"]) == case["expected"]


def test_text_behind_the_marker_does_not_hide_it() -> None:
    assert score("2+40=42\n#### 42\n" + "x" * 480, "42") == 1
    assert score("\\boxed{" + " " * 500 + "42}" + " That is it." * 100, "42") == 1


def test_unreadable_gold_rewards_nobody() -> None:
    for completion in ("42", "the figure shows 42", r"\boxed{42}", "", "Answer: see it", r"\boxed{\text{figure}}"):
        assert score(completion, "see the figure") == 0


@pytest.mark.parametrize(
    "gold", [72, 72.0, "72", " 72.00 ", "$72$", "\\$72", np.int64(72), np.float32(72), Fraction(72)]
)
def test_types_of_gold(gold: object) -> None:
    assert score("#### 72", gold) == 1
    assert score("#### 73", gold) == 0


@pytest.mark.parametrize("gold", [None, float("nan"), "", "  ", np.float64("nan")])
def test_missing_gold_abstains(gold: object) -> None:
    assert score("#### 72", gold) is None


def test_rewards_and_nested_column() -> None:
    reward = MathAnswer("reward_model.ground_truth", correct=2.0, wrong=-0.5)
    columns = {"reward_model": [{"ground_truth": "72"}, {"ground_truth": "72"}, {"style": "rule"}]}
    assert reward(completions=["72", "73", "72"], **columns) == [2.0, -0.5, None]


def test_missing_column_is_named() -> None:
    with pytest.raises(RewardError, match=r"'answer'.*Columns: gold"):
        MathAnswer()(completions=["1"], gold=["1"])
    with pytest.raises(RewardError, match="2 completions, but 1 values"):
        MathAnswer()(completions=["1", "2"], answer=["1"])


def test_bad_options() -> None:
    for options in ({"timeout_seconds": 0}, {"timeout_seconds": float("inf")}, {"correct": float("nan")}):
        with pytest.raises(ConfigurationError):
            MathAnswer(**options)
    with pytest.raises(ConfigurationError):
        MathAnswer(answer_column="")


def test_check_columns_reports_rows() -> None:
    golds = [
        "72",
        None,
        "see the figure",
        "Tuesday",
        r"\frac{1}{",
        r"\frac{\pi}{2}",
        "",
        "[2,5)",
        "9 apples are left over",
    ]
    found = MathAnswer().check_columns({"answer": golds})
    assert [message.split("row ")[1].split()[0] for message in found] == ["1", "2", "4", "6", "8"]
    assert "see the figure" in found[1]
    assert "columns: gold" in MathAnswer().check_columns({"gold": ["1"]})[0]


def test_plain_numbers_need_no_algebra_system() -> None:
    code = (
        "import sys, time\n"
        "from lit_rlhf.rewards.math import MathAnswer\n"
        "reward = MathAnswer()\n"
        "done = ['We add.\\n#### %d' % i for i in range(512)]\n"
        "assert sum(reward(completions=done, answer=list(range(512)))) == 512\n"
        "assert not {'math_verify', 'sympy', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_plain_numbers_are_quick() -> None:
    reward, golds = MathAnswer(), [str(i) for i in range(512)]
    completions = ["First we add, then we subtract 3 from 17.\n" * 10 + f"#### {i:,}.00" for i in range(512)]
    reward(completions=completions, answer=golds)
    start = time.perf_counter()
    assert sum(map(float, reward(completions=completions, answer=golds))) == 512  # type: ignore[arg-type]
    assert time.perf_counter() - start < 0.5


def test_tower_of_powers_from_a_thread() -> None:
    results: list = []
    start = time.perf_counter()
    thread = threading.Thread(
        target=lambda: results.extend(MathAnswer()(completions=[TOWER, r"\boxed{7}", TOWER], answer=["7"] * 3))
    )
    thread.start()
    thread.join(20)
    assert results == [0, 1, 0]
    assert time.perf_counter() - start < 5


def test_endless_formula_ends_and_the_next_call_works() -> None:
    score(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")  # the start of the worker is not part of the limit
    start = time.perf_counter()
    results: list = []
    thread = threading.Thread(
        target=lambda: results.extend(
            MathAnswer(timeout_seconds=1.0)(completions=[ENDLESS, r"\boxed{\sqrt{12}}"], answer=["7", r"2\sqrt{3}"])
        )
    )
    thread.start()
    thread.join(60)
    assert results == [0, 1]
    assert time.perf_counter() - start < 30
    assert score(r"\boxed{\sqrt{12}}", r"2\sqrt{3}") == 1


def test_workers_end_with_the_interpreter() -> None:
    code = (
        "from lit_rlhf.rewards.math import MathAnswer, _pool\n"
        "assert MathAnswer()(completions=[r'\\boxed{\\sqrt{12}}'], answer=[r'2\\sqrt{3}']) == [1.0]\n"
        "print([w.pid for w in _pool().workers if w.pid][0])\n"
    )
    # No guard for __main__, as in a short script: the child must not run the script again.
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=90,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert not psutil.pid_exists(int(done.stdout))


def test_number_of_workers_is_bounded() -> None:
    golds = [rf"\sqrt{{{n}}}" for n in (2, 3, 5, 6, 7, 10)]
    of_others = {child.pid for child in psutil.Process().children()} - {worker.pid for worker in _pool().workers}
    assert MathAnswer()(completions=[rf"\boxed{{{g} + 0}}" for g in golds], answer=golds) == [1.0] * 6
    children = [c for c in psutil.Process().children() if "lit_rlhf.rewards.isolation" in " ".join(c.cmdline())]
    children = [child for child in children if child.pid not in of_others]
    assert len(children) <= len(_pool().workers) <= max(1, min(4, os.cpu_count() or 1))


@pytest.mark.parametrize(
    "junk",
    [
        "7" * 1_000_000,
        "{" * 10_000 + "}" * 10_000,
        "\\boxed{" * 100_000,
        "\\boxed{" + "{" * 10_000 + "7" + "}" * 10_000 + "}",
        "\\boxed{" + "(" * 400 + "7" + ")" * 400 + "}",
        "\\boxed{" + "-" * 900 + "7}",
        "####" * 250_000,
        "<answer>" * 100_000,
        "answer is " * 100_000,
        "$" * 200_000,
        "$7" * 200_000,
        "1,111" * 200_000,
        "\\frac{" * 100_000,
        "<think>" * 100_000,
        "\\boxed{" + "\\text{" * 150 + "}" * 150 + "}",
        "\\boxed{" + "7, " * 300 + "}",
        "\\boxed{" + "a " * 400 + "}",
        "\\boxed{" + "9^" * 300 + "9}",
        "\\boxed{" + "1" * 990 + "^2}",
        "\\boxed{" + "m/" * 400 + "}",
        "7 " + "a^" * 450,
    ],
    ids=range(21),
)
def test_junk_ends_quickly(junk: str) -> None:
    start = time.perf_counter()
    assert score(junk, "7,8") == 0
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/2 + 1/4", Fraction(3, 4)),
        ("2(3+4)", Fraction(14)),
        ("-2^2", Fraction(-4)),
        ("2^3^2", Fraction(512)),
        (r"\sqrt{16}", Fraction(4)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        (r"2\frac{3}{2}", Fraction(3)),
        ("1e-3", Fraction(1, 1000)),
        (r"\frac{1}{0}", None),
        ("0^{-1}", None),
        ("1 2", None),
        (r"\divides 3", None),
        ("x", None),
        ("", None),
        ("²", None),
        (r"\frac²2", None),
    ],
)
def test_evaluate(text: str, value: Fraction | None) -> None:
    assert evaluate(text) == value


def test_evaluate_refuses_what_does_not_fit() -> None:
    for text in ("5^{5^{5^{5}}}", "10^{10^{10}}", "1e99999999", "2^{-9999999}"):
        with pytest.raises(TooLargeError):
            evaluate(text)
    assert evaluate("1^{99999999999}") == 1
    assert evaluate("(-1)^{99999999999}") == -1


def test_may_explode() -> None:
    assert may_explode("x+5^{5^{5^{5}}}")
    assert may_explode("x+2^{99999}")
    assert may_explode("x+2^5^5^5")
    assert may_explode("x+99999999!")
    assert not may_explode("10!")
    assert not may_explode(r"e^{x^{2}}")
    assert not may_explode(r"\frac{1}{2^{99}}x")


def test_extraction_order() -> None:
    text = "1\nThe answer is 2.\n<answer>3</answer>\n#### 4\n\\boxed{5}"
    for marker, expected in (
        (r"\boxed{5}", "5"),
        ("#### 4", "4"),
        ("<answer>3</answer>", "3"),
        ("The answer is 2.", "2"),
    ):
        assert read(extract_answer(text).text).text == expected  # type: ignore[union-attr]
        text = text.replace(marker, "")
    assert extract_answer(text).text == "1"  # type: ignore[union-attr]
    assert extract_answer("<think>2</think>") is None


def conventions() -> list[tuple[str, str, bool]]:
    """Rows of the table in the documentation, one for each answer and reference that stand in a cell."""
    text = (Path(__file__).parents[2] / "docs" / "data_and_rewards.md").read_text(encoding="utf-8")
    table = text.split("### How MathAnswer compares")[1].split("| answer | reference | equal |")[1]
    found = []
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        answers, references, equal = [cell.strip() for cell in line.strip("|").split("|")][:3]
        cells = [cell.strip("`").split("`, `") for cell in (answers, references)]
        found += [(answer, reference, equal == "yes") for answer, reference in zip(*cells, strict=True)]
    return found


@pytest.mark.parametrize(("answer", "reference", "equal"), conventions())
def test_the_documented_conventions_hold(answer: str, reference: str, equal: bool) -> None:
    boxed = answer if "<think>" in answer or "boxed" in answer else f"\\boxed{{{answer}}}"
    assert score(boxed, reference) == float(equal)


def test_the_table_of_conventions_is_found() -> None:
    assert len(conventions()) > 25


# Of each kind of the cases, others than the file has.
@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("1000000", "\\boxed{1\\,000\\,000}", 1),
        ("18", "#### £18", 1),
        ("-18", "#### -$18", 1),
        ("72", "The answer is **72**.", 1),
        ("72", "answer is 72, since 48+24=72.", 1),
        ("5", "\\boxed{5~\\text{cm}^2}", 1),
        ("0.67", "\\boxed{2/3}", 0),
        ("0.25", "\\boxed{25}", 0),
        ("50%", "\\boxed{\\frac12}", 1),
        ("0.00012", "\\boxed{1.2\\times10^{-4}}", 1),
        ("5", "\\boxed{-5}", 0),
        ("-7", "So x = –7", 1),
        ("13/4", "\\boxed{3\\frac{1}{4}}", 1),
        ("\\frac{\\sqrt{2}}{2}", "\\boxed{\\frac{1}{\\sqrt{2}}}", 1),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1),
        ("B", "The answer is (B).", 1),
        ("7", "#### 5\n#### 7", 1),
        ("5", "<answer>5</answer> no, <answer>7</answer>", 0),
        ("9", "\\boxed{9} is in \\boxed", 1),
        ("9", "<think>it is 9</think>", 0),
        ("5", "Question: 5 apples plus 4?\nAnswer: 9\nQuestion: another 5", 0),
        ("0", "\\boxed{}", 0),
        ("(-\\infty,3]", "\\boxed{x \\le 3}", 1),
        ("[2,5]\\cup[7,9]", "\\boxed{[7,9]\\cup[2,5]}", 1),
        ("\\{1,2\\}", "\\boxed{\\{1,1,2\\}}", 1),
        ("\\{1,2,3\\}", "\\boxed{\\{1,2,2\\}}", 0),
        ("1,2", "\\boxed{1,1,2}", 0),
        ("(3,-1)", "\\boxed{x=3, y=-1}", 1),
        ("y=2x+1", "\\boxed{2x+1}", 1),
        ("10^{100}", "\\boxed{10^{100}+1}", 0),
        ("1.0000001", "\\boxed{1}", 0),
        ("72", "48+24=<<48+24=72>>72", 1),
    ],
)
def test_other_cases_of_the_same_kinds(gold: str, completion: str, expected: float) -> None:
    assert score(completion, gold) == expected
