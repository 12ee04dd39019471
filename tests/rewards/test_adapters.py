from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import ComputeScore, Guarded, InWorkers, MathAnswer, RewardFunc, RewardScorer
from lit_rlhf.rewards.loading import load_function

COLUMNS = {
    "data_source": ["gsm8k", "math"],
    "reward_model": [{"ground_truth": "4"}, {"ground_truth": "5"}],
    "extra_info": [{"index": 0}, {"index": 1}],
}


def score(fn: Any, columns: dict[str, Any] | None = None, chat: bool = False) -> Any:
    prompts: list[Any] = ["2+2=", "2+3="]
    completions: list[Any] = ["4", "6"]
    if chat:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    scorer = RewardScorer([fn])
    scorer.check(list(columns or {}))
    return scorer(prompts, completions, [[1], [2, 3]], columns or {})


@pytest.mark.parametrize("chat", [False, True])
def test_compute_score(chat: bool) -> None:
    seen = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        right = float(solution_str == ground_truth)
        return {"score": right, "acc": right == 1, "pred": solution_str, "length": len(solution_str)}

    scores = score(ComputeScore(compute_score), COLUMNS, chat)
    assert scores.names == ("compute_score",)
    assert scores.total.tolist() == [1, 0]
    assert seen == [("gsm8k", "4", "4", {"index": 0}), ("math", "6", "5", {"index": 1})]
    assert dict(zip(scores.extra_names, scores.extras.T.tolist(), strict=True)) == {
        "compute_score/acc": [1, 0],
        "compute_score/length": [1, 1],
    }


def test_compute_score_with_fewer_arguments_columns_and_as_async() -> None:
    async def compute_score(solution_str: str, ground_truth: str, scale: float) -> float:
        await asyncio.sleep(0)
        return scale * (solution_str == ground_truth)

    reward = ComputeScore(compute_score, ground_truth_column="answer", kwargs={"scale": 2.0})
    assert score(reward, {"answer": ["4", "6"]}).total.tolist() == [2, 2]
    with pytest.raises(RewardError, match=r"needs the column 'answer'.*Columns: gold"):
        score(reward, {"gold": [1, 2]})
    with pytest.raises(RewardError, match="has no 'score', only acc"):
        ComputeScore(lambda **_: {"acc": 1}, ground_truth_column="a")(completions=["x"], a=[1])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", ["list", "tensor", "dictionary"])
def test_reward_func(kind: str, chat: bool) -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
        assert prompts == ["2+2=", "2+3="]
        rewards = [float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)]
        if kind == "list":
            return rewards
        if kind == "tensor":
            return torch.tensor(rewards)
        return {
            "rewards": torch.tensor(rewards),
            "scores": torch.tensor([0.5, 0.25]),
            "extra_logs": {"n": [1, 2], "t": "x"},
        }

    scores = score(RewardFunc(reward_func), {"label": ["4", "5"]}, chat)
    assert scores.total.tolist() == [1, 0]
    if kind == "dictionary":
        assert scores.extra_names == ("reward_func/n", "reward_func/scores")
        assert scores.extras.T.tolist() == [[1, 2], [0.5, 0.25]]
    with pytest.raises(RewardError, match="no 'rewards', only scores"):
        score(RewardFunc(lambda queries: {"scores": [1, 2]}))


def test_functions_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("CALLS = []\ndef compute_score(solution_str, ground_truth):\n    return 0.5\nLIMIT = 3\n")
    assert score(ComputeScore(f"{file}:compute_score"), COLUMNS).total.tolist() == [0.5, 0.5]
    assert load_function(f"{file}:compute_score") is load_function(f"{file}:compute_score")
    assert load_function("os.path:join") is load_function("os.path.join") is os.path.join
    for name, message in {
        "compute_score": "names no function",
        "no_such_module_.f": "no module 'no_such_module_'",
        "math.no_such": "has no 'no_such'",
        "math.pi": "has a float, no function",
        f"{file}:LIMIT": "has a int, no function",
        f"{tmp_path}/none.py:f": "there is no file",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            load_function(name)


SLOW = """
import os, time

def slow_reward(completions, target):
    text = completions[0]
    if text == "hang":
        time.sleep(1000)
    if text == "leave":
        os._exit(1)
    if text == "raise":
        raise ValueError("bad row")
    if text == "break":
        return [1.0, 2.0]
    return [None if text == "skip" else float(len(text) == target[0])]
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    (tmp_path / "slow.py").write_text(SLOW)
    return f"{tmp_path}/slow.py:slow_reward"


def in_workers(name: str, texts: list[str], **options: Any) -> Any:
    reward = InWorkers(name, workers=1, timeout_seconds=1.0, **options)
    scorer = RewardScorer([reward])
    scorer.check(["target"])
    scores = scorer(["p"] * len(texts), texts, [[1]] * len(texts), {"target": [2] * len(texts)})
    assert reward._pool is not None
    reward._pool.close()
    return scores


def test_in_workers_a_row_that_hangs_costs_itself_alone(name: str) -> None:
    scores = in_workers(name, ["ab", "hang", "abc", "leave", "skip", "raise", "ab"])
    assert scores.components[:, 0].nan_to_num(-1).tolist() == [1, -1, 0, -1, -1, -1, 1]
    assert scores.extra_names == ("slow_reward/failed",)
    assert scores.extras[:, 0].tolist() == [0, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(("text", "message"), [("raise", "bad row"), ("hang", "at row 1: No answer within 1 s")])
def test_in_workers_may_stop_the_run(name: str, text: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        in_workers(name, ["ab", text], on_error="raise")


def test_in_workers_refuses_what_breaks_the_contract(name: str) -> None:
    with pytest.raises(RewardError, match="expected 1 rewards, got 2"):
        in_workers(name, ["ab", "break"])


def test_in_workers_takes_objects_and_can_be_wrapped() -> None:
    reward = InWorkers(MathAnswer(), workers=1)
    assert Guarded(reward).required_columns == ("answer",)
    scores = RewardScorer([reward])(["p"], ["#### 4"], [[1]], {"answer": ["4"]})
    assert scores.names == ("math_answer",)
    assert scores.total.tolist() == [1]
