"""Rows dealt to servers that come and go, which small ones stand in for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.engines import SamplingParams, VLLMServers
from lit_rlhf.errors import ConfigurationError, EngineError, EngineLostError
from tests.engines.vllm.stand import KEYS, whole


def sample(stands: Any, policy: Any, **options: Any) -> Any:
    engine = VLLMServers([stand.url for stand in stands], **{"max_rows": 4, **options})
    return engine, engine.generate(policy, [[5, 6]] * 10, 4, SamplingParams(8), KEYS)


def test_rows_are_shared_by_the_servers_and_each_gets_the_weights_once(stands, llama):
    engine, generation = sample(stands, llama)
    whole(generation)
    assert sorted(stands[0].answered + stands[1].answered) == KEYS.tolist()
    assert all(stand.answered and len(stand.loaded) == 1 for stand in stands)
    whole(engine.generate(llama, [[5, 6]] * 10, 4, SamplingParams(8), KEYS))
    assert [len(stand.loaded) for stand in stands] == [1, 1]
    llama.lm_head.weight.data.neg_()
    try:
        whole(engine.generate(llama, [[5, 6]] * 10, 4, SamplingParams(8), KEYS))
    finally:
        llama.lm_head.weight.data.neg_()
    assert [len(stand.loaded) for stand in stands] == [2, 2]


@pytest.mark.parametrize("trouble", ["hang up", (500, {"error": "EngineDeadError"}), (503, {})], ids=str)
def test_rows_of_a_lost_server_go_to_another(stands, llama, trouble):
    calls: list[str] = []

    def dies(path: str, body: Any) -> Any:
        calls.append(path)
        return trouble if calls.count("/inference/v1/generate") > 6 or (path == "/health" and len(calls) > 20) else None

    stands[0].trouble = dies
    _, generation = sample(stands, llama)
    whole(generation)
    assert sorted(stands[0].answered + stands[1].answered) == KEYS.tolist()


def test_a_server_that_forgets_its_weights_gets_them_before_it_is_asked_again(stands, llama):
    def restarts(path: str, body: Any) -> Any:
        if len(stands[0].answered) == 9 and stands[0].version != "default":
            stands[0].version = "default"
            return "hang up"
        return None

    stands[0].trouble = restarts
    _, generation = sample(stands[:1], llama)
    whole(generation)
    assert len(stands[0].loaded) == 2


def test_a_server_that_another_run_gives_weights_to_is_given_up(stands, llama):
    def another(path: str, body: Any) -> Any:
        if path == "/inference/v1/generate" and stands[0].version != "default":
            stands[0].version = "another's"
        return None

    stands[0].trouble = another
    with pytest.raises(EngineError, match="sampled with weights another's, again and again: does another run use it"):
        sample(stands[:1], llama)


def test_a_connection_that_the_server_closed_in_between_is_made_anew(stands, llama):
    seen: set[int] = set()

    def closes_once(path: str, body: Any) -> Any:
        if path != "/inference/v1/generate" or len(stands[0].answered) < 5 or seen:
            return None
        seen.add(1)
        return "hang up"

    stands[0].trouble = closes_once
    _, generation = sample(stands[:1], llama, patience=0, max_rows=1)
    whole(generation)
    assert len(stands[0].loaded) == 1


def test_without_any_server_the_run_stops_and_says_why(llama):
    with pytest.raises(EngineLostError, match=r"for \d+ s: no vLLM server answers at http://127.0.0.1:9"):
        VLLMServers("127.0.0.1:9", patience=0.2).generate(llama, [[5]], 1, SamplingParams(2), KEYS[:1])


def test_weights_that_cannot_be_loaded_are_no_reason_to_try_for_ever(stands, llama):
    stands[0].trouble = lambda path, body: (500, {"error": "no such folder"}) if path == "/collective_rpc" else None
    with pytest.raises(EngineLostError, match="no such folder"):
        sample(stands[:1], llama, patience=0.2)


def test_a_request_that_is_refused_ends_the_run_at_once(stands, llama):
    def refuses(path: str, body: Any) -> Any:
        too_long = path == "/inference/v1/generate" and len(body["token_ids"]) > 1
        return (400, {"error": "longer than max_model_len"}) if too_long else None

    stands[0].trouble = refuses
    with pytest.raises(EngineError, match=r"refused /inference/v1/generate with 400: .*longer than max_model_len"):
        sample(stands[:1], llama, on_lost="wait")


def test_a_server_that_was_started_otherwise_is_refused(stands, llama):
    probe = {"choices": []}
    stands[0].trouble = lambda path, body: (200, probe) if path == "/inference/v1/generate" else None
    with pytest.raises(ConfigurationError, match=r"start it with: python -m lit_rlhf.engines.vllm MODEL"):
        sample(stands[:1], llama)
    stands[1].trouble = lambda path, body: (404, {}) if path == "/weight_info" else None
    with pytest.raises(ConfigurationError, match=r"start it with: python -m lit_rlhf.engines.vllm MODEL"):
        sample(stands[1:], llama)


def test_weights_in_files_are_read_as_they_were(stands, llama):
    from safetensors.torch import load_file

    engine, _ = sample(stands[:1], llama)
    files = sorted(Path(stands[0].loaded[0]).glob("*.safetensors"))
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    assert set(loaded) == set(llama.state_dict())
    assert all(bool((value == llama.state_dict()[name]).all()) for name, value in loaded.items())
    assert engine is not None, "it keeps the files as long as a server may need them"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "at least one server"),
        ({"urls": "https://host"}, "must look like http://host:8000, got 'https://host'"),
        ({"max_rows": 0}, "max_rows must be"),
        ({"patience": -1.0}, "patience must be"),
        ({"timeout": 0.0}, "timeout must be"),
        ({"lora": "both"}, "lora must be one of"),
        ({"on_lost": "retry"}, "on_lost must be one of"),
        ({"weights_dir": "/no/such/folder"}, "weights_dir must be a folder that exists"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        VLLMServers(**{"urls": "http://host:8000", **options})
