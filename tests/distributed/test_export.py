"""The folder of shards that two FSDP2 processes saved is exported by one process and resumed by two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from lit_rlhf.cli import main
from tests.distributed import fsdp2_worker

pytestmark = pytest.mark.distributed

SCENARIOS = ["grpo", "ppo-lora"]


@pytest.fixture(scope="module")
def runs(policy_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each scenario with both kinds of checkpoints, stopped and resumed."""
    folder = tmp_path_factory.mktemp("export")
    fsdp2_worker.launch(policy_dir, folder, SCENARIOS, "shards")
    return folder


@torch.no_grad()
def logits(folder: Path, adapter: bool = False) -> torch.Tensor:
    kind = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    return kind.from_pretrained(folder)(torch.arange(3, 13)[None]).logits


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_folder_of_shards_is_resumed_and_exported(scenario, runs, tmp_path):
    checkpoint = runs / scenario / "last.ckpt"
    assert checkpoint.is_dir()
    results = torch.load(runs / f"{scenario}.pt", weights_only=True)
    assert torch.equal(results["resumed"]["weights"], results["whole"]["weights"])
    adapted = "lora" in scenario
    for name, options in (("merged", ["--merge"]), ("adapter", [])) if adapted else (("all", []),):
        main(["export", "--ckpt_path", str(checkpoint), "--out", str(tmp_path / name), *options])
        expected = logits(runs / scenario / "policy")
        if name == "adapter":
            torch.testing.assert_close(logits(tmp_path / name, adapter=True), expected, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(logits(tmp_path / name), expected)
