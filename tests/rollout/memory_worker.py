"""What a process of ``test_memory.py`` does: trains a model of some size and says what memory that took."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_rlhf import GRPOModule, PPOModule, RolloutDataModule
from lit_rlhf.models.memory import memory_of
from lit_rlhf.rollout.memory import workload

SCENARIOS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "grpo": (GRPOModule, {}, {}),
    "grpo-checkpointing": (GRPOModule, {"gradient_checkpointing": True}, {}),
    "grpo-lora": (GRPOModule, {"lora_rank": 8}, {}),
    "ppo": (PPOModule, {"critic": "own"}, {}),
    "grpo-long": (GRPOModule, {"kl_coef": 0.0}, {"prompts_per_iteration": 8, "micro_batch_tokens": 160}),
}
PROMPT = "1+2=" * 32


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> str:
    """A Llama with random weights that never ends a completion, and the quickstart's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "recipes" / "quickstart" / "model")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def score(completions: list[str], **columns: Any) -> list[float]:
    """Differs inside a group."""
    return [float(row % 3) for row in range(len(completions))]


def fit(scenario: str, policy: str, folder: str) -> Any:
    """Two iterations: moments are there from the second on. The micro-batches are as large as they may be."""
    kind, options, data_options = SCENARIOS[scenario]
    defaults: dict[str, Any] = {"prompts_per_iteration": 2, "micro_batch_tokens": 640}
    data = RolloutDataModule(
        [{"prompt": PROMPT}] * 8,
        rewards=[score],
        group_size=8,
        max_new_tokens=64,
        seed=0,
        **{**defaults, **data_options},
    )
    module = kind(policy, lr=1e-5, **options)
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=folder, **off)
    trainer.fit(module, data)
    return module, data, trainer


def status(field: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(scenario: str) -> None:
    """Write the peak beyond what libraries take, and what was expected."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fit(scenario, make_model(folder / "mini", 64, 2, 64), name)  # loads the libraries
        policy = make_model(folder / "model", 384, 8, 2048)
        gc.collect()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        module, data, trainer = fit(scenario, policy, name)
        memory = memory_of(workload(module, data, len(PROMPT), cpu=True))
        moments = [v for s in trainer.optimizers[0].state.values() for k, v in s.items() if k != "step"]
        trained = [p for p in module.parameters() if p.requires_grad]
        exact = {
            "weights and copies": sum(p.nbytes for p in module.parameters()),
            "gradients": sum(p.nbytes for p in trained),
            "optimizer": sum(v.nbytes for v in moments),
        }
        expected = {
            "weights and copies": memory.weights + memory.reference + memory.critic,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
        }
        result = {"peak": status("VmHWM") - before, "estimate": memory.peak, "exact": exact, "expected": expected}
        sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
