from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule, RolloutBatch, RolloutDataModule
from lit_rlhf.callbacks import RolloutCallback

torch.set_num_threads(1)

QUICKSTART_MODEL = Path(__file__).parents[1] / "recipes" / "quickstart" / "model"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama with grouped-query heads and the character tokenizer of the quickstart."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART_MODEL)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Prompts of unequal length."""
    pairs = [(1, 2), (30, 4), (12, 345), (7, 7), (99, 1), (5, 60)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs inside groups from the first rollout on."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


@pytest.fixture
def digits() -> Callable[..., list[float]]:
    return share_of_digits


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    def make(**options: Any) -> L.Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
        }
        return L.Trainer(**{**defaults, **options})

    return make


@pytest.fixture
def fsdp2_of_one() -> Iterator[Any]:
    """The strategy for a process of its own; Lightning leaves its process group behind."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    yield ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, process_group_backend="gloo")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Watch(RolloutCallback):
    """Keeps every rollout, the micro-batches' denominators and the metrics at the end. Put it last."""

    def __init__(self) -> None:
        self.rollouts: list[RolloutBatch] = []
        self.denominators: list[float] = []
        self.sizes: list[int] = []
        self.final: dict[str, float] = {}

    def on_advantages_end(self, trainer: Any, module: Any, rollout: RolloutBatch) -> None:
        self.rollouts.append(rollout)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.denominators.append(batch.denominator)
        self.sizes.append(len(batch))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.final = {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def make_data(rows: Any, digits: Any) -> Callable[..., RolloutDataModule]:
    def make(train: Any = rows, rewards: Any = digits, **options: Any) -> RolloutDataModule:
        defaults = {"prompts_per_iteration": 6, "group_size": 4, "max_new_tokens": 6, "seed": 0, "val_samples": 2}
        return RolloutDataModule(train, rewards=rewards, **{**defaults, **options})

    return make


@pytest.fixture
def fit(make_trainer: Any, make_data: Any, policy_dir: str, watch: Watch) -> Callable[..., Any]:
    """Fit a GRPO module and return it."""

    def run(
        data: RolloutDataModule | None = None,
        callbacks: Sequence[Any] = (),
        policy: str = policy_dir,
        module: dict[str, Any] | None = None,
        ckpt_path: str | None = None,
        **trainer: Any,
    ) -> GRPOModule:
        grpo = GRPOModule(policy, **{"lr": 1e-3, **(module or {})})
        options = {"max_epochs": 2, **trainer}
        data = make_data() if data is None else data
        make_trainer(callbacks=[*callbacks, watch], **options).fit(grpo, data, ckpt_path=ckpt_path)
        return grpo

    return run


@pytest.fixture
def weights() -> Callable[[Any], torch.Tensor]:
    """All trainable numbers of a module in one vector."""

    def flat(module: Any) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])

    return flat
