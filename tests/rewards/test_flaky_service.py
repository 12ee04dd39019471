"""A reward service that fails for a while costs abstentions, not the run."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lit_rlhf import GRPOModule


class Service:
    """Shares of digits, from a service that is ill for ten iterations: it raises, hangs, or answers with garbage."""

    def __init__(self) -> None:
        self.iteration = 0
        self.chance = random.Random(0)
        self.failed = {"raise": 0, "hang": 0, "garbage": 0}

    def __call__(self, completions: list[str], **columns: Any) -> list[float | None]:
        scores: list[Any] = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
        if not 5 <= self.iteration < 15 or self.chance.random() < 0.4:
            return scores
        kind = self.chance.choice(list(self.failed))
        self.failed[kind] += 1
        if kind == "raise":
            raise ConnectionError("503")
        if kind == "hang":
            time.sleep(5)
        if kind == "garbage" and self.chance.random() < 0.5:
            return [float(answer) for answer in ["<html>"] * len(scores)]
        return [float("nan")] * len(scores)


class Watch(Callback):
    def __init__(self, service: Service) -> None:
        self.service = service
        self.rewards: list[float] = []
        self.missing: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.service.iteration = trainer.datamodule.iteration
        self.rewards.append(pl_module.iteration_values.get("reward", 0.0))  # nobody was scored
        self.missing.append(pl_module.iteration_values["reward/missing"])


@pytest.mark.timeout(400)
def test_thirty_iterations_with_an_ill_service(make_trainer, make_data, policy_dir, rows):
    service = Service()
    watch = Watch(service)
    data = make_data(rows, rewards=service, on_reward_error="abstain", reward_timeout=0.2)
    trainer = make_trainer(max_epochs=30, callbacks=[watch])
    trainer.fit(GRPOModule(policy_dir, lr=3e-3, kl_coef=0.0), data)
    assert trainer.global_step == 30
    assert all(service.failed.values()), service.failed
    assert sum(watch.missing[:5] + watch.missing[15:]) == 0
    assert sum(watch.missing[5:15]) > 0
    first, last = sum(watch.rewards[:3]) / 3, sum(watch.rewards[-3:]) / 3
    assert last > first + 0.1, (first, last)
