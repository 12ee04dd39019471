"""Ranks with different amounts of work, with none, and with an error of their own: no rank waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import uneven_worker

pytestmark = pytest.mark.distributed

SECONDS = 400  # all runs of a strategy take about half a minute; a rank that is left alone waits for half an hour


@pytest.fixture(scope="module", params=["ddp", "fsdp2", "fsdp2-sharded"])
def runs(request: Any, policy_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks found in each scenario, one after the other: starting the processes takes longest."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [uneven_worker.__file__, request.param, policy_dir, str(folder)]

    def found() -> dict[str, list[Path]]:
        files = {name: [folder / f"{name} {rank}.json" for rank in range(2)] for name in uneven_worker.SCENARIOS}
        return {name: pair for name, pair in files.items() if all(file.exists() for file in pair)}

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{request.param}: a rank still waits after {SECONDS} s; done were {', '.join(found())}")
    assert found().keys() == uneven_worker.SCENARIOS.keys(), output[-5000:]
    return {name: [json.loads(file.read_text()) for file in pair] for name, pair in found().items()}


def test_more_on_one_rank_than_on_the_other(runs):
    first, second = runs["uneven"]
    assert first["steps"] == second["steps"] == 2
    assert (first["rows"], second["rows"]) == ([12, 12], [8, 8])
    assert len(first["live"]) == len(second["live"])
    assert sum(first["live"]) > sum(second["live"]) > 0
    assert first["values"] == second["values"] != {}


def test_a_rank_without_a_prompt(runs):
    first, second = runs["one prompt"]
    assert first["steps"] == second["steps"] == 2
    assert (first["rows"], second["rows"]) == ([4, 4], [0, 0])
    assert not any(second["live"])
    assert first["values"] == second["values"] != {}


@pytest.mark.parametrize("scenario", ["reward", "held-out reward"])
def test_a_reward_that_raises_on_one_rank(runs, scenario):
    first, second = runs[scenario]
    assert second["error"].startswith("RewardError: Reward `digits` raised ValueError at row 0: the service is gone")
    assert first["error"].startswith("RewardError: a reward function failed on another rank")


def test_sampling_that_fails_on_one_rank(runs):
    first, second = runs["sampling"]
    assert second["error"] == "MemoryError: no memory left"
    assert first["error"].startswith("RewardError: sampling failed on another rank")
