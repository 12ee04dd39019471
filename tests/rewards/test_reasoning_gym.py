from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import ReasoningGym
from lit_rlhf.data.rows import read_rows
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.rewards import ReasoningGymAnswer
from lit_rlhf.rewards.protocol import check_signature
from lit_rlhf.rewards.reasoning_gym import final_answer

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the extra reasoning-gym"
)
# Their verifiers evaluate the answer as Python, compare tuples, read options, and use sympy.
TASKS = ["n_queens", "arc_agi", "decimal_arithmetic", "countdown", "polynomial_multiplication", "word_ladder"]


def columns(task: str, size: int = 2, **options: Any) -> dict[str, list[Any]]:
    rows = read_rows(ReasoningGym(task, size=size, seed=5, options=options))
    return {name: [row[name] for row in rows.rows] for name in rows.columns}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("24", "24"),
        ("<think>a <answer>1</answer></think>So <answer>\n24 </answer>!", "24"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>1", "<answer>1"),
        ("done</think> 24 ", "24"),
        ("<think>never <answer>1</answer>", None),
        ("", ""),
    ],
)
def test_the_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_a_limit_that_is_none_and_rows_of_another_source() -> None:
    with pytest.raises(ConfigurationError, match="timeout_seconds must be positive, got 0"):
        ReasoningGymAnswer(timeout_seconds=0)
    with pytest.raises(Exception, match="'task'"):
        check_signature(ReasoningGymAnswer(), ["answer"])


@needs_package
@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answer_is_right_and_another_is_not(task: str) -> None:
    given = columns(task)
    reward = ReasoningGymAnswer(timeout_seconds=30)
    right = [f"<think>...</think><answer>{answer}</answer>" for answer in given["answer"]]
    assert reward(completions=right, **given) == [1.0, 1.0]
    assert all(score < 0.5 for score in reward(completions=["I do not know", "<think>"], **given))
    chat = [[{"role": "assistant", "content": text}] for text in right]
    assert reward(completions=chat, **given) == [1.0, 1.0]


@needs_package
def test_options_reach_the_verifier() -> None:
    """How far off an answer may be follows from the largest number of decimals."""
    scores = {}
    for places in (3, 6):
        given = columns("decimal_arithmetic", min_num_decimal_places=3, max_num_decimal_places=places)
        near = [str(float(answer) + 0.0005) for answer in given["answer"]]
        scores[places] = ReasoningGymAnswer(timeout_seconds=30)(completions=near, **given)
    assert scores[3] == [1.0, 1.0]
    assert max(scores[6]) < 0.5


@needs_package
@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch {file}')",
        "__import__('subprocess').run(['touch', '{file}'])",
        "open('{file}', 'w')",
        "__import__('pathlib').Path('{file}').touch()",
        "__import__('os').fork()",
        "__import__('ctypes').CDLL(None)",
        "__import__('socket').socket()",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os')._exit(0)",
        "__import__('time').sleep(100)",
        "9**9**9**9",
        "[0] * 10**11",
        "(" * 10_000,
    ],
)
def test_an_answer_that_a_verifier_evaluates_does_no_harm(code: str, tmp_path: Path) -> None:
    given = columns("n_queens")
    file = tmp_path / "made"
    answers = [code.replace("{file}", str(file)), given["answer"][1]]
    assert ReasoningGymAnswer(timeout_seconds=2)(completions=answers, **given) == [0.0, 1.0]
    assert not file.exists()
