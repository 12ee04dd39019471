"""Servers that sample while the policy learns: small ones that stand in for vLLM, and the real one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.engines import SamplingParams, VLLMServers
from lit_rlhf.engines.vllm.files import WeightFiles
from lit_rlhf.engines.vllm.weights import weights_version
from lit_rlhf.errors import EngineError, EngineLostError
from tests.engines.vllm.stand import KEYS, whole
from tests.rollout.elsewhere import Elsewhere

PROMPTS = [[5, 6]] * 10
STALE = {"sampling_correction": "token_truncate"}


@pytest.fixture
def changed(llama: Any) -> Any:
    """Change the policy's weights, for as long as the test runs."""
    times = []

    def change() -> None:
        times.append(llama.lm_head.weight.data.neg_())

    yield change
    for _ in range(len(times) % 2):
        llama.lm_head.weight.data.neg_()


def held_back(stand: Any) -> threading.Event:
    """Let a server answer no row before it is said so."""
    free = threading.Event()
    stand.trouble = lambda path, body: path == "/inference/v1/generate" and free.wait(20) and None
    return free


def begin(stands: Any, policy: Any, **options: Any) -> Any:
    engine = VLLMServers([stand.url for stand in stands], max_rows=4, **options)
    return engine, engine.start(policy, PROMPTS, 4, SamplingParams(8), KEYS)


def test_a_draw_returns_before_its_first_row_and_is_of_the_weights_from_before(stands, llama, changed):
    free, version = held_back(stands[0]), weights_version(llama)
    _, pending = begin(stands[:1], llama)
    changed()
    assert not stands[0].answered
    free.set()
    whole(pending.result())
    assert stands[0].version == version != weights_version(llama)
    whole(pending.result())  # of a checkpoint, and of the iteration


def test_a_server_that_comes_back_gets_the_weights_from_before(stands, llama, changed):
    free, version = held_back(stands[0]), weights_version(llama)
    engine, pending = begin(stands[:1], llama)
    changed()
    stands[0].version = "default"
    free.set()
    whole(pending.result())
    assert stands[0].version == version
    assert len(set(stands[0].loaded)) == 1, "what it loads again are the files from before"
    assert engine is not None


def test_other_weights_wait_for_a_draw_and_the_same_do_not(stands, llama, changed):
    free = held_back(stands[0])
    engine, pending = begin(stands[:1], llama)
    threading.Timer(0.3, free.set).start()
    whole(engine.generate(llama, PROMPTS, 4, SamplingParams(8), KEYS))
    assert len(stands[0].loaded) == 1
    changed()
    whole(engine.generate(llama, PROMPTS, 4, SamplingParams(8), KEYS))
    assert len(stands[0].loaded) == 2
    assert sorted(stands[0].answered) == sorted(3 * KEYS.tolist())
    whole(pending.result())


def test_a_draw_that_is_lost_says_so_whenever_it_is_asked_for(llama):
    pending = VLLMServers("127.0.0.1:9", patience=0.2).start(llama, [[5]], 1, SamplingParams(2), KEYS[:1])
    for _ in range(2):
        with pytest.raises(EngineLostError, match=r"for \d+ s: no vLLM server answers at http://127.0.0.1:9"):
            pending.result()


def test_a_draw_that_nobody_wants_ends(stands, llama):
    free = held_back(stands[0])
    _, pending = begin(stands[:1], llama)
    pending.cancel()
    free.set()
    for keeper in pending._keepers:
        keeper.join(10)
        assert not keeper.is_alive()
    assert len(stands[0].answered) < len(KEYS)


def test_asked_for_with_patience_a_draw_goes_on_when_its_server_is_back(stands, llama):
    gone = [True]
    stands[0].trouble = lambda path, body: (503, {}) if gone[0] else None
    engine, pending = begin(stands[:1], llama, on_lost="wait")
    with pytest.raises(EngineLostError, match="no vLLM server has answered for"):
        pending.result(patience=0.2)
    gone[0] = False
    whole(pending.result())
    assert engine is not None


def test_weights_that_cannot_be_written_are_said_at_once(stands, llama, tmp_path):
    engine = VLLMServers(stands[0].url, weights_dir=str(tmp_path))
    tmp_path.rmdir()
    with pytest.raises(EngineError, match=r"the policy's weights could not be written for the servers: .*No such file"):
        engine.start(llama, PROMPTS, 4, SamplingParams(8), KEYS)
    tmp_path.mkdir()
    whole(engine.start(llama, PROMPTS, 4, SamplingParams(8), KEYS).result())


def test_what_another_process_shares_is_never_replaced(llama, tmp_path, changed):
    """Of two trainers the second waits for the first, and writes by itself where that takes too long."""
    first, second = WeightFiles(str(tmp_path)), WeightFiles(str(tmp_path))
    first.write(llama, "a")
    second.write(llama, "a", keep=False)
    second._path = first._path  # as shared
    assert second.weights("a") == first.weights("a")
    changed()
    second.write(llama, "b")
    assert second.weights("b") != first.weights("b")
    assert sorted(Path(first.weights("a")).glob("*.safetensors"))


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_training_on_what_a_server_samples_meanwhile(quickstart, arithmetic_server, kind, tmp_path):
    """The real server, against a copy of the weights in this process."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    options = STALE if kind == "full" else {**STALE, "lora_rank": 4, "lr": 3e-3}
    servers = VLLMServers(arithmetic_server.url, lora="adapter" if kind == "adapter" else "merged", max_rows=32)
    saving = ModelCheckpoint(tmp_path / kind, "{epoch}", save_top_k=-1, every_n_epochs=1)
    torch.manual_seed(3)  # of the adapter
    _, history = quickstart(servers, 4, callbacks=[saving], staleness=1, **options)
    torch.manual_seed(3)
    _, expected = quickstart(Elsewhere(), 4, staleness=1, **options)
    assert history["sampling/staleness"] == [0, 1, 1, 1]
    assert history["reward"] == pytest.approx(expected["reward"], abs=0.03)
    assert history["sampling/log_prob_gap_mean"] == pytest.approx(
        expected["sampling/log_prob_gap_mean"], rel=0.1, abs=1e-6
    )
    assert history["sampling/log_prob_gap"][0] < 1e-4 < history["sampling/log_prob_gap"][1]

    _, resumed = quickstart(servers, 4, ckpt_path=str(tmp_path / kind / "epoch=1.ckpt"), staleness=1, **options)
    assert resumed["reward"] == history["reward"][2:]
    assert resumed["sampling/staleness"] == [1, 1]
