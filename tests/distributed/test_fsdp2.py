"""FSDP2 over two gloo processes does what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.cli import main
from tests.distributed import fsdp2_worker
from tests.distributed.fsdp2_worker import SCENARIOS

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def sharded_runs(policy_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario on two processes, in one go: starting them takes longest."""
    folder = tmp_path_factory.mktemp("fsdp2")
    _make_adapter(policy_dir)
    fsdp2_worker.launch(policy_dir, folder, list(SCENARIOS))
    return folder


def _make_adapter(policy_dir: str) -> None:
    """A trained adapter of the policy."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(Path(policy_dir, "trained"))


@pytest.fixture(params=SCENARIOS)
def runs(request: Any, sharded_runs: Path, policy_dir: str, tmp_path: Path) -> tuple[str, dict, dict, Path, Path]:
    """Name, results of one and of two processes, and the folders of both."""
    single = fsdp2_worker.fit(request.param, policy_dir, tmp_path / "single", devices=1)
    sharded = torch.load(sharded_runs / f"{request.param}.pt", weights_only=True)
    return request.param, single, sharded, tmp_path / "single", sharded_runs / request.param


def test_two_ranks_do_what_one_does(runs):
    scenario, single, sharded, alone, together = runs
    whole = sharded["whole"]
    assert whole["shares_prompts"]
    assert len(whole["gradients"]) == len(single["gradients"])
    first = single["gradients"][0]
    assert first.norm() > 0
    assert (whole["gradients"][0] - first).norm() <= 1e-5 * first.norm()
    assert (whole["weights"] - single["weights"]).abs().max() <= 1e-5
    for name, value in single["metrics"].items():
        assert whole["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name

    # The first rank has the first, third and fifth prompt.
    rows = [row for start in (0, 8, 16) for row in range(start, start + 4)]
    width = min(len(whole["tokens"][0]), len(single["tokens"][0]))
    assert [row[:width] for row in whole["tokens"]] == [single["tokens"][row][:width] for row in rows]

    # Exported for plain transformers.
    from transformers import AutoModelForCausalLM

    one, two = (AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict() for folder in (alone, together))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)
    again = alone / "export"
    merge = ["--merge"] if "lora" in scenario else []
    main(["export", "--ckpt_path", str(together / "last.ckpt"), "--out", str(again), *merge])
    for name, value in AutoModelForCausalLM.from_pretrained(again).state_dict().items():
        assert torch.equal(two[name], value)

    # Stopped and resumed.
    resumed = sharded["resumed"]
    assert (resumed["weights"] == whole["weights"]).all()
    assert resumed["tokens"] == whole["tokens"]


@pytest.mark.parametrize("name", fsdp2_worker.SHARDED_ROLLOUTS)
def test_rollouts_of_sharded_weights_are_the_same_to_the_bit(name, sharded_runs):
    gathered, sharded = (
        torch.load(sharded_runs / f"{name}{kind}.pt", weights_only=True)["whole"] for kind in ("", "-sharded")
    )
    assert gathered["sharded_in_rollouts"] == [False]
    assert sharded["sharded_in_rollouts"] == [True]
    assert sharded["tokens"] == gathered["tokens"]
    assert sharded["metrics"] == gathered["metrics"]
    assert torch.equal(sharded["weights"], gathered["weights"])
