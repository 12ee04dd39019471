"""The real vLLM as a server: trained, handed over, killed in the middle of a rollout, started again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine, VLLMServers
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.engines.vllm.replica import Replica
from lit_rlhf.engines.vllm.weights import weights_version
from lit_rlhf.errors import EngineLostError

pytestmark = pytest.mark.vllm
KEYS = row_keys(5, 0, 0, range(3), 8)
ROWS = 64 * 8  # of an iteration


def sample(engine: Any, policy: Any, tokenizer: Any) -> Any:
    prompts = [tokenizer(text).input_ids for text in ("12+34=", "7+7=", "99+38=")]
    sampling = SamplingParams(8, 1.3, 9, stop=("7",), eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=0)
    return engine.generate(policy, prompts, 8, sampling, KEYS, tokenizer)


@pytest.fixture
def at_row(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Do something when a row is asked for, before it is."""

    def plan(number: int, action: Any) -> None:
        complete, lock, asked = Replica.complete, threading.Lock(), [0]

        def counted(self: Replica, *arguments: Any) -> Any:
            with lock:
                asked[0] += 1
                if asked[0] == number:
                    action()
            return complete(self, *arguments)

        monkeypatch.setattr(Replica, "complete", counted)

    return plan


@pytest.mark.parametrize("kind", ["full", "merged", "adapter"])
def test_training_over_a_server_is_training_in_process(quickstart, arithmetic_server, kind):
    options = {} if kind == "full" else {"lora_rank": 4, "lr": 3e-3}
    engine = VLLMServers(arithmetic_server.url, lora="adapter" if kind == "adapter" else "merged", max_rows=32)
    module, history = quickstart(engine, 3, **options)
    _, expected = quickstart("transformers", 3, **options)
    assert max(history["sampling/log_prob_gap"]) < 1e-4
    assert history["reward"] == pytest.approx(expected["reward"], abs=0.03)
    assert history["reward"][-1] > history["reward"][0]
    one = sample(engine, module.policy, module.tokenizer)
    other = sample(TransformersEngine(), module.policy, module.tokenizer)
    assert torch.equal(one.completion_ids, other.completion_ids)
    assert torch.equal(one.finished, other.finished)
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-4)


def test_weights_that_somebody_else_changes_meanwhile_are_replaced(arithmetic, arithmetic_server, at_row):
    policy, tokenizer = arithmetic
    at_row(10, lambda: Replica(arithmetic_server.url, 60).finish("another's"))
    one = sample(VLLMServers(arithmetic_server.url, max_rows=1), policy, tokenizer)
    assert torch.equal(one.completion_ids, sample(TransformersEngine(), policy, tokenizer).completion_ids)
    assert Replica(arithmetic_server.url, 60).version() == weights_version(policy)


def test_a_run_waits_for_a_server_that_dies_in_a_rollout_and_goes_on_when_it_is_back(
    quickstart, arithmetic_server, at_row
):
    def die() -> None:
        arithmetic_server.kill()
        arithmetic_server.start()

    at_row(ROWS + 100, die)
    _, history = quickstart(VLLMServers(arithmetic_server.url, on_lost="wait", patience=0, max_rows=32), 3)
    _, expected = quickstart("transformers", 3)
    assert len(history.metrics) == 3
    assert max(history["sampling/log_prob_gap"]) < 1e-4
    assert history["reward"] == pytest.approx(expected["reward"], abs=0.03)


def test_a_run_that_stops_for_its_server_is_saved_and_goes_on_from_there(
    quickstart, arithmetic_server, at_row, tmp_path
):
    at_row(2 * ROWS + 100, arithmetic_server.kill)
    with pytest.raises(EngineLostError, match=r"no vLLM server has answered for \d+ s: .*127.0.0.1"):
        quickstart(VLLMServers(arithmetic_server.url, patience=10, max_rows=32), 4)
    (checkpoint,) = tmp_path.rglob("interrupted.ckpt")
    assert torch.load(checkpoint, weights_only=False)["global_step"] == 2

    arithmetic_server.start()
    arithmetic_server.wait()
    _, resumed = quickstart(VLLMServers(arithmetic_server.url, max_rows=32), 4, ckpt_path=str(checkpoint))
    _, expected = quickstart("transformers", 4)
    assert resumed["reward"] == pytest.approx(expected["reward"][2:], abs=0.03)
