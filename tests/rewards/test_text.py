from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lit_rlhf import rewards
from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import ExactMatch, FormatMatch, ThinkFormat
from lit_rlhf.rewards.messages import completion_text


def test_exact_match() -> None:
    golds = ["Paris", "Paris", "Straße", "Paris", None, 7]
    texts = [" paris\n", "Paris.", "STRASSE", "", "x", "7"]
    assert ExactMatch()(completions=texts, answer=golds) == [1, 0, 1, 0, None, 1]
    assert ExactMatch(normalize=False)(completions=["Paris", "paris"], answer=["Paris"] * 2) == [1, 0]
    assert ExactMatch("meta.gold")(completions=["a  b"], meta=[{"gold": "a b"}]) == [1]
    with pytest.raises(RewardError, match="no column 'answer'"):
        ExactMatch()(completions=["x"])
    with pytest.raises(RewardError, match="2 completions, but 1"):
        ExactMatch()(completions=["x", "y"], answer=["x"])


def test_format_match() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>\s*"
    texts = ["<think>a\nb</think>\n<answer>4</answer>\n", "So <think>a</think><answer>4</answer>", "4"]
    assert FormatMatch(pattern)(completions=texts, answer=[1, 2, 3]) == [1, 0, 0]
    assert FormatMatch(pattern, full=False)(completions=texts) == [1, 1, 0]
    with pytest.raises(ConfigurationError, match="not a regular expression"):
        FormatMatch("(")


@pytest.mark.parametrize(
    ("text", "closed", "opened"),
    [
        ("<think>First\nadd.</think>\nThe answer is 4.", 1, 0),
        ("\n<think>a</think>4", 1, 0),
        ("First add.</think>\nThe answer is 4.", 0, 1),
        ("<think>a</think>4<think>b</think>5", 0, 0),
        ("<think><think>a</think></think>4", 0, 0),
        ("<think>a</think>  \n", 0, 0),
        ("<think> </think>4", 0, 0),
        ("<think>a 4", 0, 0),
        ("</think>a<think>", 0, 0),
        ("Well, <think>a</think>4", 0, 0),
        ("The answer is 4.", 0, 0),
        ("", 0, 0),
    ],
)
def test_think_format(text: str, closed: int, opened: int) -> None:
    chat = [{"role": "assistant", "content": text}]
    assert ThinkFormat()(completions=[text, chat]) == [closed] * 2
    assert ThinkFormat(opened_in_prompt=True)(completions=[text, chat]) == [opened] * 2


def test_completion_text() -> None:
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}]
    assert completion_text(parts) == "ab"
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    assert completion_text([]) == completion_text(None) == ""
    turns = [
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "2"},
    ]
    assert completion_text(turns) == "2"


def test_exports_are_lazy() -> None:
    assert set(rewards.__all__) <= set(dir(rewards))
    for name in rewards.__all__:
        assert getattr(rewards, name).__name__ == name
    with pytest.raises(AttributeError, match="Missing"):
        rewards.Missing  # noqa: B018
    code = "import sys, lit_rlhf.rewards; assert not {'torch', 'math_verify', 'sympy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
