"""Whatever a model writes, every reward gives a number or abstains, and soon."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.rewards import (
    CodeTests,
    Countdown,
    ExactMatch,
    FormatMatch,
    JSONSchema,
    LengthReward,
    MathAnswer,
    RepetitionPenalty,
    RewardScorer,
    SoftOverlongPenalty,
    ThinkFormat,
)

COLUMNS = {"answer": "42", "target": 24, "nums": [3, 8, 1], "tests": ["assert f(1) == 2"]}
LARGE = 1_000_000


def rewards() -> dict[str, Any]:
    found: dict[str, Any] = {
        "math": MathAnswer(timeout_seconds=1.0),
        "exact": ExactMatch(),
        "format": FormatMatch(r"<think>.*?</think>\s*<answer>.*?</answer>\s*", timeout_seconds=0.2),
        "format search": FormatMatch(r"<think>.*?</think>", full=False, timeout_seconds=0.2),
        "think": ThinkFormat(),
        "length": LengthReward(1, 100, 10, "words"),
        "overlong": SoftOverlongPenalty(100, 10),
        "repetition": RepetitionPenalty(20),
        "countdown": Countdown(),
    }
    try:
        import jsonschema  # noqa: F401

        found["json"] = JSONSchema({"type": "object"}, timeout_seconds=1.0)
    except ImportError:
        pass
    try:
        import resource  # noqa: F401

        found["code"] = CodeTests(timeout_seconds=1.0, memory_mb=256)
    except ImportError:
        pass
    return found


REWARDS = rewards()


def junk() -> dict[str, str]:
    chance = random.Random(0)
    code = [f"```python\n{text}\n```" for text in ("\0", "(" * 10_000, "x" * LARGE, "def f(x: '\ud800'): pass")]
    return {
        "empty": "",
        "spaces": " \t\n" * 1000,
        "random bytes": bytes(chance.randrange(256) for _ in range(20_000)).decode("latin-1"),
        "broken utf-8": bytes(chance.randrange(256) for _ in range(20_000)).decode("utf-8", "replace"),
        "surrogates": "\ud800\udfff answer is \ud800 \\boxed{\udc00} <answer>\ud800</answer>",
        "nul": "\0 \\boxed{\0} <answer>\0</answer>\n#### \0",
        "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd 42 \u0645\u0631\u062d \u0664\u0662 \\boxed{\u0664\u0662}",
        "braces": "\\boxed{" + "{" * 10_000 + "42" + "}" * 10_000 + "}",
        "open braces": "\\boxed{" * 10_000,
        "brackets": "(" * 10_000 + "42" + ")" * 10_000,
        "answer of brackets": "<answer>" + "(" * 10_000 + "</answer>",
        "one letter": "a" * LARGE,
        "digits": "9" * LARGE,
        "answer of digits": "\\boxed{" + "9" * 100_000 + "}",
        "commas": "The answer is " + "1," * (LARGE // 2),
        "think tags": "<think>" * (LARGE // 7),
        "closed think tags": "<think>" + "</think>" * (LARGE // 8),
        "answer tags": "<answer>" * (LARGE // 8),
        "closed answer tags": "<answer>1" + "</answer>" * (LARGE // 9),
        "hashes": "####" * (LARGE // 4),
        "lines of hashes": "#### \n" * (LARGE // 6),
        "phrases": "the answer is " * (LARGE // 14),
        "dollars": "$" * LARGE,
        "fences": "```\n" * (LARGE // 4),
        "json": "[" * LARGE,
        "json numbers": '{"a": ' + "9" * 100_000 + "}",
        "backslashes": "\\" * LARGE,
        "fractions": "\\boxed{" + "\\frac{1}{" * 300 + "2" + "}" * 300 + "}",
        "signs": "\\boxed{" + "-" * 900 + "42}",
        "powers": "\\boxed{9^{9^{9^{9}}}}",
        "unicode": "".join(chr(chance.randrange(0x10FFFF)) for _ in range(20_000)),
        "combining": "e" + "\u0301" * 100_000,
        **{f"code {place}": text for place, text in enumerate(code)},
    }


JUNK = junk()


def check(reward: Any, texts: list[str], chat: bool = False) -> None:
    completions: list[Any] = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    columns = {name: [value] * len(texts) for name, value in COLUMNS.items()}
    prompts: list[Any] = ["p"] * len(texts)
    scores = RewardScorer([reward])(prompts, completions, [list(range(min(len(t), 500))) for t in texts], columns)
    values = scores.components[:, 0].tolist()
    assert all(math.isnan(value) or -1 <= value <= 1 for value in values)
    # The sound row beside them is judged as if it were alone.
    alone = RewardScorer([reward])(
        ["p"],
        [completions[-1]],
        [list(range(min(len(texts[-1]), 500)))],
        {name: [value] for name, value in COLUMNS.items()},
    )
    assert alone.components[0, 0].item() == values[-1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", REWARDS)
def test_junk(name: str) -> None:
    check(REWARDS[name], [*JUNK.values(), "<think>x</think> <answer>3*8*1</answer> #### 42"])


@pytest.mark.parametrize("name", REWARDS)
def test_junk_in_messages(name: str) -> None:
    small = [text for text in JUNK.values() if len(text) < 30_000]
    check(REWARDS[name], [*small, "#### 42"], chat=True)


@pytest.mark.parametrize("name", [name for name in REWARDS if name not in ("code", "json")])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=300) | st.from_regex(r"(\\boxed\{|<answer>|#### ?)[-+*/^{}()0-9,.$%\\ a-z]{0,60}"))
def test_any_text(name: str, text: str) -> None:
    check(REWARDS[name], [text])


@pytest.mark.parametrize(
    "gold", ["\ud800", "\0", "{" * 10_000, "9" * 100_000, "\\frac{" * 100, "9^{9^{9^{9}}}", "a" * LARGE]
)
def test_junk_for_a_reference(gold: str) -> None:
    for reward in (MathAnswer(timeout_seconds=1.0), ExactMatch()):
        reward.check_columns({"answer": [gold]}) if hasattr(reward, "check_columns") else None
        assert reward(completions=["42", ""], answer=[gold, gold])[0] == 0
