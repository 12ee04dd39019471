from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import DivergenceReport, RolloutCallback
from lit_rlhf.errors import ConfigurationError, DivergedError


class Poison(RolloutCallback):
    """One completion of an iteration gets an advantage that is not a number."""

    def __init__(self, iterations: list[int], row: int = 5) -> None:
        self.iterations, self.row = iterations, row
        self.text = ""

    def on_advantages_end(self, trainer: Any, module: Any, rollout: Any) -> Any:
        if trainer.datamodule.iteration not in self.iterations:
            return None
        self.text = rollout.completions[self.row]
        advantages = rollout.advantages.clone()
        advantages[self.row] = float("nan")
        return rollout.replace(advantages=advantages)


def lines(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_offending_row_comes_first(make_trainer, make_data, policy_dir, tmp_path, caplog):
    poison = Poison([1])
    trainer = make_trainer(max_epochs=3, callbacks=[poison])
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data())
    assert trainer.global_step == 3
    (file,) = (tmp_path / "diverged").iterdir()
    assert file.name == "iteration-00001-step-0.jsonl"
    records = lines(file)
    assert records[0]["completion"] == poison.text
    assert records[0]["not_finite"] == ["advantages"]
    assert {"prompt_index", "prompt", "tokens"} <= set(records[0])
    assert not any(record["not_finite"] for record in records[1:])
    assert str(file) in caplog.text


def test_micro_batches_and_a_limit(make_trainer, make_data, policy_dir, tmp_path):
    poison, report = Poison([0, 1, 2]), DivergenceReport(most_files=2)
    trainer = make_trainer(max_epochs=3, callbacks=[poison, report])
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data(micro_batch_size=9))
    names = sorted(path.name for path in (tmp_path / "diverged").iterdir())
    assert {name[:15] for name in names} == {"iteration-00000", "iteration-00001"}
    assert sum(any(record["not_finite"] for record in lines(tmp_path / "diverged" / name)) for name in names) == 2


def test_a_policy_that_is_not_finite_any_more(make_trainer, make_data, policy_dir, tmp_path):
    class Break(RolloutCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad():
                next(pl_module.policy.parameters()).fill_(float("nan"))

    with pytest.raises(DivergedError, match="diverged/ in the log folder"):
        make_trainer(max_epochs=3, callbacks=[Break()]).fit(GRPOModule(policy_dir), make_data())
    records = lines(tmp_path / "diverged" / "iteration-00001-rollout.jsonl")
    assert all(record["not_finite"] == ["sampling_log_probs"] for record in records)


def test_options():
    with pytest.raises(ConfigurationError, match="most_files must be a number in"):
        DivergenceReport(most_files=-1)
