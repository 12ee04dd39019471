from __future__ import annotations

import asyncio
import functools
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import MathAnswer, RewardFunction, RewardScorer, call_reward
from lit_rlhf.rewards.protocol import check_signature, reward_name


def call(fn: Any, count: int = 4, columns: dict | None = None, **options: Any) -> torch.Tensor:
    return call_reward(
        fn,
        prompts=[f"p{i}" for i in range(count)],
        completions=[f"c{i}" for i in range(count)],
        completion_ids=[[i] for i in range(count)],
        columns=columns or {},
        **options,
    )


def returning(value: Any, name: str = "math") -> Any:
    def fn(completions: list) -> Any:
        return value

    fn.__name__ = name
    return fn


@pytest.mark.parametrize(
    "value",
    [
        [True, False, True, True],
        [1, 0, 1, 1],
        (1.0, 0.0, 1.0, 1.0),
        list(np.array([1, 0, 1, 1], dtype=np.float32)),
        list(np.array([1, 0, 1, 1], dtype=bool)),
        np.array([1, 0, 1, 1]),
        np.array([[1], [0], [1], [1]]),
        [torch.tensor(v) for v in (1.0, 0.0, 1.0, 1.0)],
        torch.tensor([[1.0], [0.0], [1.0], [1.0]], requires_grad=True),
        torch.tensor([1, 0, 1, 1], dtype=torch.bfloat16),
    ],
)
def test_accepted(value: Any) -> None:
    rewards = call(returning(value))
    assert rewards.tolist() == [1, 0, 1, 1]
    assert rewards.dtype == torch.float32
    assert rewards.device.type == "cpu"
    assert not rewards.requires_grad


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "`math`: expected 4 rewards, got 1"),
        ([1.0, 0.0, 1.0], "`math`: expected 4 rewards, got 3"),
        (torch.ones(1), "expected 4 rewards, got 1"),
        (torch.ones(4, 4), r"shape \(4, 4\)"),
        (torch.tensor(1.0), r"expected 4 rewards, got an array of shape \(\)"),
        (["1", "0", "1", "1"], "row 0 is of type str '1'"),
        ({"a": 1}, "got dict"),
        ([1, {}, 1, 1], "row 1 is of type dict"),
        (1.0, "got float"),
        (None, "got NoneType"),
        ([[1.0, 2.0], [1.0], [], [0.0]], "row 0 has 2 token rewards, but the completion has 1 tokens"),
        ([1, 2, np.zeros(3), 1], "row 2 has 3 token rewards, but the completion has 1 tokens"),
        ([1, 2, 1j, 1], "row 2 is of type complex"),
        ([0, math.inf, 0, 0], "`math`: reward of row 1 is inf"),
        ([0, 0, 0, -math.inf], "row 3 is -inf"),
        ([0, 10**400, 0, 0], "row 1 is inf"),
        ([0, 1e39, 0, 0], "row 1"),
        (np.array(["1", "0", "1", "1"]), "row 0 is of type str"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "abstain"])
def test_refused(value: Any, message: str, on_error: str) -> None:
    with pytest.raises(RewardError, match=message):
        call(returning(value), on_error=on_error)


def test_none_abstains_and_nan_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rewards = call(returning([1.0, None, 0, 1]))
    assert rewards.isnan().tolist() == [False, True, False, False]
    assert not caplog.records
    rewards = call(returning([1.0, 0, math.nan, math.nan]))
    assert rewards.isnan().tolist() == [False, False, True, True]
    assert len(caplog.records) == 1
    assert "`math`" in caplog.text
    assert "row 2, 3" in caplog.text


def fails_at(row: int) -> Any:
    def brittle(completions: list) -> list:
        if f"c{row}" in completions:
            raise ValueError("no number")
        return [1.0] * len(completions)

    return brittle


def test_exception_names_function_row_and_prompt() -> None:
    with pytest.raises(RewardError, match=r"`brittle` raised ValueError at row 3: no number.*'p3'") as caught:
        call(fails_at(3))
    assert isinstance(caught.value.__cause__, ValueError)


def test_exception_of_no_single_row() -> None:
    def whole(completions: list) -> list:
        if len(completions) > 1:
            raise KeyError("batch")
        return [0.0]

    with pytest.raises(RewardError, match=r"`whole` raised KeyError.*no single row"):
        call(whole)


def test_abstain_keeps_the_other_rows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rewards = call(fails_at(2), on_error="abstain")
    assert rewards.isnan().tolist() == [False, False, True, False]
    assert "1 of 4 rows" in caplog.text
    assert "row 2" in caplog.text


def test_only_the_arguments_asked_for() -> None:
    columns = {"answer": list("abcd"), "difficulty": [1, 2, 3, 4]}
    seen: dict = {}

    def narrow(answer: list, *, completion_ids: list) -> list:
        seen.update(answer=answer, ids=completion_ids)
        return [0.0] * 4

    def wide(prompts: list, **rest: Any) -> list:
        seen["wide"] = sorted(rest)
        return [0.0] * 4

    call(narrow, columns=columns)
    call(wide, columns=columns)
    assert seen["answer"] == list("abcd")
    assert seen["ids"] == [[0], [1], [2], [3]]
    assert seen["wide"] == ["answer", "completion_ids", "completions", "difficulty"]


def test_missing_parameter_reserved_column_and_lengths() -> None:
    def needs(completions: list, target: list, extra: int = 3) -> list:
        return [0.0]

    with pytest.raises(RewardError, match=r"`needs` takes 'target'.*Columns: answer, level"):
        check_signature(needs, ["answer", "level"])
    check_signature(needs, ["target"])
    with pytest.raises(RewardError, match="'completions' has the name"):
        check_signature(needs, ["target", "completions"])
    with pytest.raises(RewardError, match=r"math_answer.*'answer'.*Columns: gold"):
        check_signature(MathAnswer(), ["gold"])
    check_signature(MathAnswer("reward_model.ground_truth"), ["reward_model"])
    with pytest.raises(RewardError, match="4 completions, but 2 values in 'target'"):
        call(needs, columns={"target": [1, 2]})


def test_async_function_with_and_without_a_running_loop() -> None:
    async def slow(completions: list) -> list:
        await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    class Judge:
        async def __call__(self, completions: list) -> list:
            await asyncio.sleep(0)
            raise OSError("offline")

    async def within() -> torch.Tensor:
        return call(slow)

    assert call(slow).tolist() == [1.0] * 4
    assert asyncio.run(within()).tolist() == [1.0] * 4
    with pytest.raises(RewardError, match="`judge` raised OSError at row 0: offline"):
        call(Judge())


def test_names() -> None:
    class HTTPJudge:
        def __call__(self, completions: list) -> list:
            return []

    named = HTTPJudge()
    named.name = "judge"  # type: ignore[attr-defined]

    def plain(completions: list, scale: float) -> list:
        return []

    @functools.wraps(plain)
    def decorated(*args: Any, **kwargs: Any) -> list:
        return plain(*args, **kwargs)

    assert reward_name(HTTPJudge()) == "http_judge"
    assert reward_name(MathAnswer()) == "math_answer"
    assert reward_name(named) == "judge"
    assert reward_name(functools.partial(functools.partial(plain), scale=1.0)) == "plain"
    assert reward_name(decorated) == "plain"
    assert isinstance(plain, RewardFunction)


def scores(*functions: Any, **options: Any) -> Any:
    return RewardScorer(functions, **options)(["p"] * 4, ["c"] * 4, [[1]] * 4, {})


def test_abstention_is_left_out_of_the_sum() -> None:
    found = scores(returning([1.0, None, 0.0, 1.0]), returning([1, 1, 0, 1], "format"), weights=[1, 1])
    assert found.total.tolist() == [2, 1, 0, 2]
    assert found.names == ("math", "format")
    assert found.scored_mask.all()
    math_column = found.components[:, 0]
    assert math_column.nanmean().item() == pytest.approx(2 / 3)
    assert int(math_column.isnan().sum()) == 1
    assert found.components.shape == (4, 2)


def test_all_abstain() -> None:
    nan = [math.nan] * 4
    found = scores(returning(nan), returning([1, 1, 0, 1], "format"))
    assert found.total.tolist() == [1, 1, 0, 1]
    assert found.scored_mask.all()
    found = scores(returning([None, 1, None, None]))
    assert found.total.tolist() == [0, 1, 0, 0]
    assert found.scored_mask.tolist() == [False, True, False, False]


def test_weights_and_unique_names() -> None:
    found = scores(returning([1] * 4, "a"), returning([0] * 4, "a"), weights=[0.7, 0.3])
    assert found.total.tolist() == pytest.approx([0.7] * 4)
    assert found.names == ("a", "a_2")


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ([], {}, "No reward functions"),
        ([returning([])], {"weights": [1, 2]}, "1 reward functions, but 2 reward weights"),
        ([returning([])], {"weights": [math.nan]}, "weight 0 must be a finite number, got nan"),
        ([returning([])], {"weights": ["1"]}, "weight 0"),
        (["math"], {}, "Reward function 0 cannot be called: 'math' is of type str"),
        ([MathAnswer], {}, "is the class MathAnswer"),
        ([returning([])], {"on_error": "skip"}, "on_error"),
    ],
)
def test_bad_scorer(functions: list, options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RewardScorer(functions, **options)


def test_check_runs_nothing() -> None:
    scorer = RewardScorer([fails_at(0), MathAnswer()])
    scorer.check(["answer"])
    with pytest.raises(RewardError, match="needs the column 'answer'"):
        scorer.check(["gold"])
