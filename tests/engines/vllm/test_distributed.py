"""Two processes that train and sample with vLLM do what one does without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("trainer_worker.py")
ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(*arguments: str) -> dict[str, list[float]]:
        out = tmp_path_factory.mktemp("run") / "metrics.json"
        strategy, *url = arguments
        done = subprocess.run(
            [sys.executable, WORKER, strategy, out, *url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        metrics = json.loads(out.read_text(encoding="utf-8"))
        return {name: [values[name] for values in metrics] for name in ("reward", "sampling/log_prob_gap")}

    return run


@pytest.fixture(scope="module")
def alone(train: Any) -> dict[str, list[float]]:
    return train("auto")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "sharded"])
def test_each_process_samples_with_a_vllm_of_its_own(train, alone, strategy):
    found = train(strategy)
    assert max(found["sampling/log_prob_gap"]) < 1e-4
    assert found["reward"] == pytest.approx(alone["reward"], abs=0.05)


@pytest.mark.parametrize("strategy", ["fsdp2", "sharded"])
def test_all_processes_share_a_server_and_one_of_them_brings_it_up_to_date(train, alone, arithmetic_server, strategy):
    found = train(strategy, arithmetic_server.url)
    assert max(found["sampling/log_prob_gap"]) < 1e-4
    assert found["reward"] == pytest.approx(alone["reward"], abs=0.05)
