"""Length, repetition, countdown and JSON: rewards that a rule decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import Countdown, FormatMatch, JSONSchema, LengthReward, RepetitionPenalty, SoftOverlongPenalty


def test_soft_overlong_penalty_is_that_of_dapo() -> None:
    penalty = SoftOverlongPenalty(max_length=20_480, buffer=4_096)
    lengths = [0, 1, 16_384, 16_385, 18_432, 20_479, 20_480, 20_481, 40_000]
    expected = [0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1]
    assert penalty(completion_ids=[[1] * n for n in lengths]) == pytest.approx(expected)
    assert SoftOverlongPenalty(4, 4)(completion_ids=[[1] * n for n in range(6)]) == [0, -0.25, -0.5, -0.75, -1, -1]
    for options in ((0, 1), (4, 0), (4, 5)):
        with pytest.raises(ConfigurationError, match="SoftOverlongPenalty"):
            SoftOverlongPenalty(*options)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40), st.integers(0, 120))
def test_length_reward_falls_in_straight_lines(low: int, more: int, margin: int, length: int) -> None:
    reward = LengthReward(minimum=low, maximum=low + more, margin=margin)
    value, closer = reward(completions=["", ""], completion_ids=[[1] * length, [1] * max(low, min(low + more, length))])
    assert closer == 1
    beyond = max(low - length, length - low - more, 0)
    assert value == (1 if not beyond else pytest.approx(max(0, 1 - beyond / margin)) if margin else 0)


def test_units_of_length() -> None:
    texts = ["one two  three", [{"role": "assistant", "content": "one"}], ""]
    assert LengthReward(minimum=2, unit="words")(completions=texts) == [1, 0, 0]
    assert LengthReward(maximum=3, unit="characters")(completions=texts) == [0, 1, 1]
    with pytest.raises(ConfigurationError, match="minimum, maximum or both"):
        LengthReward()
    with pytest.raises(ConfigurationError, match="unit"):
        LengthReward(1, unit="lines")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="maximum"):
        LengthReward(5, 4)


def test_repetition() -> None:
    loop, plain = "again and " * 50, " ".join(map(str, range(100)))
    values = RepetitionPenalty(ngram=3, penalty=2.0)(completions=[loop, plain, "", "a b", loop.upper()])
    assert values == [pytest.approx(-2 * (1 - 2 / 98)), 0, 0, 0, values[0]]
    assert RepetitionPenalty(2, unit="tokens")(completions=["", ""], completion_ids=[[5, 5, 5, 5], [1, 2, 3]]) == [
        pytest.approx(-2 / 3),
        0,
    ]
    for options in ({"ngram": 0}, {"penalty": 0}, {"unit": "lines"}):
        with pytest.raises(ConfigurationError, match="RepetitionPenalty"):
            RepetitionPenalty(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "target", "nums", "expected"),
    [
        ("(8/1)*3", 24, [3, 8, 1], 1),
        ("(8 ÷ 1) × 3", 24, [3, 8, 1], 1),
        ("8 \\times 3 \\div 1", 24, [3, 8, 1], 1),
        ("81*1", 81, [1, 81, 1, 1], 0),
        ("81*1*1*1", 81, [1, 81, 1, 1], 1),
        ("81+1/(1+1)", 81, [1, 81, 1, 1], 0),  # 81.5
        ("8/(3-8/3)", 24, [3, 3, 8, 8], 1),  # exact, where floats are not
        ("-1+3+2", 4, [1, 2, 3], 1),
        ("3*8", 24, [3, 8, 1], 0),
        ("3*8*1*1", 24, [3, 8, 1], 0),
        ("24", 24, [3, 8, 1], 0),
        ("3*8*1=24", 24, [3, 8, 1], 0),
        ("3=3", 3, [3], 0),
        ("3**8", 6561, [3, 8], 0),
        ("8//3", 2, [3, 8], 0),
        ("1/(3-3)", 1, [1, 3, 3], 0),
        ("38", 38, [3, 8], 0),
        ("3 8", 38, [3, 8], 0),
        ("__import__('os').system('true')", 0, [0], 0),
        ("x+3", 3, [3], 0),
        ("3.0*8*1", 24, [3, 8, 1], 0),
        ("1_0", 10, [10], 0),
        ("03+1", 4, [3, 1], 0),
        ("", 3, [3], 0),
        ("(" * 120 + "3" + ")" * 120, 3, [3], 1),
        ("(" * 290, 3, [3], 0),
        ("-" * 290 + "3", 3, [3], 1),
        ("1" + "+1" * 200, 201, [1] * 201, 0),  # longer than any honest answer
        ("٣*8*1", 24, [3, 8, 1], 0),
    ],
)
def test_countdown(answer: str, target: int, nums: list[int], expected: float) -> None:
    completion = f"<think>3*8 = 24</think> <answer>1+1</answer> no: <answer>{answer}</answer>"
    for numbers in (nums, np.array(nums)):
        assert Countdown()(completions=[completion], target=[target], nums=[numbers]) == [expected]


def test_countdown_needs_an_answer_and_a_task() -> None:
    reward = Countdown()
    texts = ["3*8*1", "<think><answer>3*8*1</answer>", "<ANSWER> 3*8*1 </ANSWER>", "<answer>3*8*1"]
    assert reward(completions=texts, target=[24] * 4, nums=[[3, 8, 1]] * 4) == [0, 0, 1, 0]
    columns: dict[str, Any] = {"target": [None, 24, 24, "24"], "nums": [[1], None, [], ["3", 8, 1]]}
    assert reward(completions=["<answer>3*8*1</answer>"] * 4, **columns) == [None, None, None, 1]
    assert [message.split(" of ")[1][:5] for message in reward.check_columns(columns)] == ["row 0", "row 1", "row 2"]
    with pytest.raises(RewardError, match=r"no column 'nums'.*Columns: target"):
        reward(completions=["x"], target=[1])


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city"],
    "additionalProperties": False,
}


class TestJSONSchema:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("jsonschema")

    def test_values(self) -> None:
        cases = {
            '{"city": "Paris", "people": 2}': 1,
            ' {"city": "Paris"}\n': 1,
            'Here:\n```json\n{"city": "Paris"}\n```\n': 1,
            '```json\n{"town": 1}\n```\n```\n{"city": "Paris"}\n```': 1,
            '<think>{"town": 1}</think>{"city": "Paris"}': 1,
            '{"city": "Paris"} and more': 0,
            '{"city": "Paris", "people": -1}': 0,
            '{"city": "Paris", "mayor": "x"}': 0,
            '{"city": NaN}': 0,
            "{'city': 'Paris'}": 0,
            "[" * 100_000: 0,
            '<think>{"city": "Paris"}': 0,
            "": 0,
        }
        for completion, expected in cases.items():
            assert JSONSchema(SCHEMA)(completions=[completion]) == [expected], completion[:50]
        chat = [{"role": "assistant", "content": '{"city": "Paris"}'}]
        assert JSONSchema(SCHEMA)(completions=[chat]) == [1]

    def test_schema_of_a_file_and_of_a_column(self, tmp_path: Path) -> None:
        path = tmp_path / "schema.json"
        path.write_text(json.dumps(SCHEMA))
        assert JSONSchema(str(path))(completions=['{"city": "Paris"}']) == [1]
        reward = JSONSchema(schema_column="schema")
        schemas = [{"type": "integer"}, '{"type": "string"}', None, "no schema", {"type": 3}]
        assert reward(completions=["1"] * 5, schema=schemas) == [1, 0, None, None, None]
        found = reward.check_columns({"schema": schemas})
        assert [message.split()[3] for message in found] == ["2", "3", "4"]

    def test_a_pattern_made_to_take_forever_ends(self) -> None:
        reward = JSONSchema({"type": "string", "pattern": "^(a+)+$"}, timeout_seconds=0.5)
        assert reward(completions=['"' + "a" * 60 + 'b"', '"aa"']) == [0, 1]

    def test_no_document_is_fetched(self) -> None:
        reward = JSONSchema({"$ref": "http://127.0.0.1:9/schema.json"}, timeout_seconds=5)
        assert reward(completions=["1"]) == [0]

    def test_bad_options(self, tmp_path: Path) -> None:
        for options in ({}, {"schema": SCHEMA, "schema_column": "x"}, {"schema": {"type": 3}}, {"schema": "none.json"}):
            with pytest.raises(ConfigurationError, match="JSONSchema"):
                JSONSchema(**options)  # type: ignore[arg-type]


def test_json_schema_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lit-rlhf\[json\]'"):
        JSONSchema({})


def test_a_pattern_made_to_take_forever_is_no_match(caplog: pytest.LogCaptureFixture) -> None:
    reward = FormatMatch(r"(?:x+x+)+y", timeout_seconds=0.05)
    assert reward(completions=["x" * 200_000, "x" * 200_000, "xxy"]) == [0, 0, 1]
    assert caplog.text.count("took more than 0.05 s") == 1
