from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import CodeTests, RewardScorer
from lit_rlhf.rewards.code_blocks import JSON, last_code_block
from lit_rlhf.rewards.unit_tests import split_tests

pytest.importorskip("resource")

MBPP = {
    "test_list": ["assert double(2) == 4", "assert double(0) == 0", "assert double(-1) == -2"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
HUMAN_EVAL = {
    "prompt": 'def inc(n: int) -> int:\n    """Return n plus one."""\n',
    "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 6\n",
    "entry_point": "inc",
}


def block(code: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{code}\n```\nThat is all."


def score(reward: CodeTests, completion: Any, **row: Any) -> float | None:
    return reward(completions=[completion], **{name: [value] for name, value in row.items()}).rewards[0]


def test_share_of_tests_or_all_of_them() -> None:
    wrong_for_negative = block("def double(n):\r\n    return 2 * abs(n)")
    assert score(CodeTests("test_list"), wrong_for_negative, **MBPP) == pytest.approx(2 / 3)
    assert score(CodeTests("test_list", all_or_nothing=True), wrong_for_negative, **MBPP) == 0
    assert score(CodeTests("test_list", all_or_nothing=True), block("def double(n): return n + n"), **MBPP) == 1


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (block("def inc(n: int) -> int:\n    return n + 1"), 1),
        ("    return n + 1\n", 1),
        ("    return n\n", 0),
        (block("def other(n):\n    return n + 1"), 0),  # the signature in the prompt alone is no solution
        ("<think>\n    return n\n</think>    return n + 1\n", 1),
        ("<think> so far", 0),
    ],
)
def test_human_eval_layout(completion: str, expected: float) -> None:
    row = {**HUMAN_EVAL, "prompts": HUMAN_EVAL["prompt"]}
    assert score(CodeTests("test", prefix_column="prompts"), completion, **row) == expected
    chat = [{"role": "assistant", "content": completion}]
    assert score(CodeTests("test", prefix_column="prompts"), chat, **row) == expected


def test_what_the_program_is() -> None:
    reward, right, wrong = CodeTests("test_list"), "def double(n): return 2 * n", "def double(n): return n"
    cases = {
        "no block at all: " + right: 0,
        "": 0,
        block(wrong) + block(right): 1,
        block(right) + block(wrong): pytest.approx(1 / 3),
        block(right) + block("4", "text"): 1,
        block(right, ""): 1,
        block(right, "py"): 1,
        block(right, "Python3"): 1,
        block(right, "javascript"): 0,
        f"```python\n{right}": 1,  # cut off, or ended by a stop string
        f"~~~~python\n{right}\n~~~~": 1,
        f"<think>{block(wrong)}</think>{block(right)}": 1,
        f"{block(right)}<think>{block(wrong)}": 0,
    }
    for completion, expected in cases.items():
        assert score(reward, completion, **MBPP) == expected, completion


def test_rows_without_tests_have_no_reward() -> None:
    reward = CodeTests()
    tests: list[Any] = [
        [],
        None,
        "",
        "import math",
        "def check(candidate):\n    assert candidate(1)",
        "assert (",
        3,
        [1],
    ]
    output = reward(completions=[block("def f(): pass")] * len(tests), tests=tests)
    assert output.rewards == [None] * len(tests)
    assert output.extras["has_code"] == [None] * len(tests)
    said = reward.check_columns({"tests": [*tests, ["assert f()"], np.array(["assert f()"])]})
    assert [message.split(":")[0] for message in said] == [f"tests of row {row}" for row in range(len(tests))]
    assert "no entry point" in said[4]
    assert "columns: other" in reward.check_columns({"other": [1]})[0]


def test_extras_are_logged_by_name() -> None:
    scorer = RewardScorer([CodeTests(timeout_seconds=1.0)])
    completions = [block("def f(): return 1"), "nothing", block("while True: pass")]
    scores = scorer(["p"] * 3, completions, [[1]] * 3, {"tests": [["assert f() == 1"]] * 3})
    assert scores.total.tolist() == [1, 0, 0]
    assert scores.extra_names == ("code_tests/has_code", "code_tests/completed")
    assert scores.extras is not None
    assert scores.extras.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert scorer.extra_means.take() == {"code_tests/has_code": 2 / 3, "code_tests/completed": pytest.approx(1 / 3)}


def test_broken_setup_names_the_reward() -> None:
    with pytest.raises(RewardError, match=r"CodeTests: the tests are broken: ModuleNotFoundError"):
        score(CodeTests(setup_column="setup"), block("x = 1"), tests=["assert x == 1"], setup="import no_such_module_")


def test_bad_options() -> None:
    bad: list[dict[str, Any]] = [{"timeout_seconds": 0}, {"memory_mb": 1}, {"max_processes": 0}, {"workers": 0}]
    for options in (*bad, {"tests_column": ""}, {"max_disk_mb": 0}):
        with pytest.raises(ConfigurationError):
            CodeTests(**options)
    with pytest.raises(RewardError, match=r"no column 'tests'.*Columns: answer"):
        CodeTests()(completions=["x"], answer=["1"])


# Programs that never end, leave early, take all memory, and fork without end.
FAULTS = [
    "while True: pass",
    "import sys; sys.exit(0)",
    "x = bytearray(100 << 30)",
    "import os\nopen('here', 'w').write('x')\nwhile True: os.fork()",
]


def in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("run", [lambda call: call(), in_thread], ids=["main thread", "other thread"])
def test_faulty_programs_leave_the_other_rows_alone(run: Callable[[Callable[[], Any]], Any]) -> None:
    reward = CodeTests(timeout_seconds=1.5, memory_mb=256, max_processes=6)
    completions = [block(program) for program in FAULTS] + [block("def f(x): return 2")]
    for _ in range(2):
        output = run(lambda: reward(completions=completions, tests=["assert f(1) == 2"] * 5))
        assert output.rewards == [0, 0, 0, 0, 1]


def test_inside_a_training_run(policy_dir: str, rows: list, make_trainer: Callable[..., L.Trainer]) -> None:
    reward, seen = CodeTests(timeout_seconds=1.5, memory_mb=256, max_processes=6), []

    def programs(completions: list[str], answer: list[str]) -> list[float | None]:
        written = [block([*FAULTS, "def f(x): return 2"][place % 5]) for place in range(len(completions))]
        seen.append(reward(completions=written, tests=["assert f(1) == 2"] * len(written)).rewards)
        return seen[-1]

    data = RolloutDataModule(rows, rewards=[programs], prompts_per_iteration=6, group_size=2, max_new_tokens=3)
    make_trainer(max_epochs=2).fit(GRPOModule(policy_dir), data)
    assert seen == [[0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]] * 2


def test_code_blocks() -> None:
    assert last_code_block("```json\n{}\n```\n```python\nx\n```", JSON) == "{}\n"
    assert last_code_block("````\n```\ninner\n```\n````") == "```\ninner\n```\n"
    assert last_code_block("```python\na\n```python\nb\n```") == "b\n"
    assert last_code_block("  ```py title=x\n  a\n  ```") == "  a\n"
    assert last_code_block("`` `x` ``") is None
    for junk in ("`" * 200_000, "```" + "a" * 200_000 + "`", "```\n" * 50_000, "```" + " " * 200_000 + "`"):
        last_code_block(junk)


def test_split_tests() -> None:
    assert split_tests(["assert f(1)", "x = 2\nassert f(x)"]) == [
        ("1", "assert f(1)"),
        ("", "x = 2"),
        ("2", "assert f(x)"),
    ]
    assert split_tests('["assert f(1)", "assert f(2)"]') == [("1", "assert f(1)"), ("2", "assert f(2)")]
    pytest_style = "def test_a():\n    assert f(1)\ndef test_b():\n    assert f(2)\ndef helper(): pass"
    assert [name for name, _ in split_tests(pytest_style)] == ["", "1", "2"]
    assert split_tests(pytest_style)[1:] == [("1", "test_a()"), ("2", "test_b()")]
    assert [name for name, _ in split_tests("for i in range(3):\n    assert f(i) == i")] == ["1"]
    assert split_tests(HUMAN_EVAL["test"], "inc")[-1] == ("1", "check(inc)")
    with pytest.raises(ValueError, match="no entry point"):
        split_tests(HUMAN_EVAL["test"], "inc(); cheat")
