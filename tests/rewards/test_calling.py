"""How reward functions are called: at the same time, within their time, and what a failing one costs."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.callbacks import RolloutCallback
from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import Guarded, RewardOutput, RewardScorer
from lit_rlhf.rewards.calling import evaluate_reward, evaluate_rewards
from lit_rlhf.rewards.protocol import is_async

FOUR: dict[str, Any] = {
    "prompts": [f"p{i}" for i in range(4)],
    "completions": [f"c{i}" for i in range(4)],
    "completion_ids": [[i] for i in range(4)],
    "columns": {},
}


def test_async_functions_run_at_the_same_time_and_beside_plain_ones() -> None:
    # Each waits for the others: called one after the other they would wait for ever.
    here: list[str] = []
    all_here = threading.Event()

    def arrive(name: str) -> None:
        here.append(name)
        if len(here) == 3:
            all_here.set()

    async def one(completions: list) -> list:
        arrive("one")
        while not all_here.is_set():
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    async def two(completions: list) -> list:
        arrive("two")
        while not all_here.is_set():
            await asyncio.sleep(0.001)
        return [2.0] * len(completions)

    def plain(completions: list) -> list:
        arrive("plain")
        assert all_here.wait(20)
        return [3.0] * len(completions)

    values = evaluate_rewards([one, plain, two], **FOUR)
    assert [value.totals[0] for value in values] == [1, 3, 2]


def test_async_calls_share_one_event_loop() -> None:
    loops = []

    async def judge(completions: list) -> list:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    for _ in range(2):
        evaluate_reward(judge, **FOUR)
    assert loops[0] is loops[1]


def test_what_counts_as_async() -> None:
    async def judge(completions: list) -> list:
        return [1.0] * len(completions)

    @functools.wraps(judge)
    def waited(*args: Any, **kwargs: Any) -> list:
        return asyncio.run(judge(*args, **kwargs))

    found = [is_async(fn) for fn in (judge, functools.partial(judge), Guarded(judge), waited, Guarded(waited))]
    assert found == [True, True, True, False, False]
    for fn in (
        judge,
        functools.partial(judge),
        Guarded(judge),
        waited,
        Guarded(waited),
        lambda completions: judge(completions),
    ):
        assert evaluate_reward(fn, **FOUR).totals == [1.0] * 4
        assert evaluate_reward(fn, timeout_seconds=20.0, **FOUR).totals == [1.0] * 4


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_call_ends_in_its_time(kind: str) -> None:
    stop = threading.Event()

    def slow(completions: list) -> list:
        stop.wait(60)
        return [0.0] * len(completions)

    async def slow_async(completions: list) -> list:
        await asyncio.sleep(60)
        return [0.0] * len(completions)

    fn = slow if kind == "plain" else slow_async
    with pytest.raises(RewardError, match=rf"`{fn.__name__}` did not answer within 0.1 s"):
        evaluate_reward(fn, timeout_seconds=0.1, **FOUR)
    values = evaluate_reward(fn, timeout_seconds=0.1, on_error="abstain", **FOUR)
    assert values.tensor().isnan().all()
    assert values.extras["failed"] == [1, 1, 1, 1]
    stop.set()


def test_a_timeout_of_the_functions_own_is_an_error_like_others() -> None:
    async def judge(completions: list) -> list:
        if "c2" in completions:
            raise asyncio.TimeoutError
        return [1.0] * len(completions)

    values = evaluate_reward(judge, timeout_seconds=30.0, on_error="abstain", **FOUR)
    assert values.extras["failed"] == [0, 0, 1, 0]
    with pytest.raises(RewardError, match="TimeoutError at row 2"):
        evaluate_reward(judge, timeout_seconds=30.0, **FOUR)


def test_a_failing_service_costs_its_rows_and_nothing_else() -> None:
    calls = []

    def service(completions: list) -> list:
        calls.append(len(completions))
        if "c1" in completions or "c3" in completions:
            raise ConnectionError("503")
        return [1.0] * len(completions)

    def other(completions: list) -> list:
        return [0.5] * len(completions)

    scores = RewardScorer([service, other], on_error="abstain")(**FOUR)
    assert scores.total.tolist() == [1.5, 0.5, 1.5, 0.5]
    assert scores.scored_mask.all()
    assert calls == [4, 1, 1, 1, 1]
    assert scores.extra_names == ("service/failed", "other/failed")
    assert scores.extras is not None
    assert scores.extras.T.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]


def test_what_breaks_the_contract_is_refused_with_either_setting() -> None:
    with pytest.raises(RewardError, match="expected 4 rewards, got 1"):
        evaluate_reward(lambda completions: [1.0], on_error="abstain", **FOUR)


def test_a_function_with_rules_of_its_own() -> None:
    def flaky(completions: list, answer: list) -> list:
        raise OSError("down")

    def sure(completions: list) -> list:
        return [1.0] * len(completions)

    scorer = RewardScorer([Guarded(flaky, timeout_seconds=30), sure])
    scores = scorer(**{**FOUR, "columns": {"answer": [1] * 4, "other": [2] * 4}})
    assert scorer.names == ("flaky", "sure")
    assert scores.total.tolist() == [1, 1, 1, 1]
    assert scores.extra_names == ("flaky/failed",)
    with pytest.raises(RewardError, match=r"`flaky` takes 'answer'"):
        scorer.check(["other"])
    with pytest.raises(RewardError, match="`judge` raised OSError"):
        RewardScorer([Guarded(flaky, on_error="raise", name="judge")])(**{**FOUR, "columns": {"answer": [1] * 4}})
    for options in ({"on_error": "skip"}, {"timeout_seconds": 0}):
        with pytest.raises(ConfigurationError, match="Guarded"):
            Guarded(sure, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="reward_timeout"):
        RewardScorer([sure], timeout_seconds=-1)


def test_extra_values_are_checked_and_named() -> None:
    def judge(completions: list) -> RewardOutput:
        return RewardOutput([1.0, None, 0.0, 1.0], {"words": [3, None, True, torch.tensor(2.0)], "calls": [1] * 4})

    def trl_style(completions: list, log_metric: Callable, log_extra: Callable, **columns: Any) -> list:
        assert "log_metric" not in columns
        log_metric("accuracy", 0.25)
        log_extra("length", [1, 2, 3, 4])
        log_extra("answer", ["a", "b", "c", "d"])  # text is nothing to average
        return [0.0] * 4

    scorer = RewardScorer([judge, trl_style])
    scorer.check([])
    assert scorer(**FOUR).extra_names == ("judge/words", "judge/calls", "trl_style/accuracy", "trl_style/length")
    assert scorer.extra_means.take() == {
        "judge/calls": 1.0,
        "judge/words": 2.0,
        "trl_style/accuracy": 0.25,
        "trl_style/length": 2.5,
    }
    assert scorer.extra_means.take() == {}
    with pytest.raises(RewardError, match="judge: extra value n`: expected 4 values, got 1"):
        evaluate_reward(Guarded(lambda completions: RewardOutput([0.0] * 4, {"n": [1]}), name="judge"), **FOUR)


class _Logged(RolloutCallback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append(dict(pl_module.iteration_values))  # type: ignore[arg-type]


def test_a_run_outlives_a_service_that_fails_for_a_while(
    policy_dir: str, rows: list, make_trainer: Callable[..., L.Trainer], digits: Callable
) -> None:
    calls = []

    async def judge(completions: list) -> RewardOutput:
        calls.append(len(completions))
        if 1 < len(calls) <= 14:
            raise ConnectionError("503")
        return RewardOutput([0.5] * len(completions), {"tokens": [7] * len(completions)})

    logged = _Logged()
    data = RolloutDataModule(
        rows,
        val=rows,
        val_samples=0,
        rewards=[digits, Guarded(judge)],
        prompts_per_iteration=6,
        group_size=2,
        max_new_tokens=4,
    )
    trainer = make_trainer(max_epochs=3, callbacks=[logged], limit_val_batches=0)
    trainer.fit(GRPOModule(policy_dir), data)
    failed = [values["reward/judge/failed"] for values in logged.values]
    assert failed == [0.0, 1.0, 0.0]
    assert "reward/judge" not in logged.values[1]
    assert [values["reward/judge/tokens"] for values in (logged.values[0], logged.values[2])] == [7, 7]
    assert [values["reward/missing"] for values in logged.values] == [0, 0, 0]
