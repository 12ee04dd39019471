"""Short runs of the quickstart, watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.rewards import MathAnswer
from tests.engines.vllm.server import Server
from tests.engines.vllm.stand import Stand

ROOT = Path(__file__).parents[3]


class History(L.Callback):
    """The metrics of each iteration."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def __getitem__(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.metrics]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "reward" in trainer.callback_metrics:  # of the iteration before
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture
def quickstart(make_trainer: Any) -> Callable[..., tuple[GRPOModule, History]]:
    """Train the quickstart's base for a few iterations with an engine."""

    def run(
        engine: Any,
        iterations: int,
        ckpt_path: str | None = None,
        callbacks: Any = (),
        staleness: Any = 0,
        **module: Any,
    ) -> Any:
        grpo = GRPOModule(str(ROOT / "checkpoints" / "arithmetic"), **{"lr": 3e-4, **module})
        data = RolloutDataModule(
            ROOT / "recipes" / "quickstart" / "data" / "train.jsonl",
            rewards=[MathAnswer()],
            prompts_per_iteration=64,
            group_size=8,
            max_new_tokens=8,
            seed=1,
            engine=engine,
            staleness=staleness,
        )
        history = History()
        trainer = make_trainer(
            max_epochs=iterations, callbacks=[history, *callbacks], enable_checkpointing=bool(callbacks)
        )
        trainer.fit(grpo, data, ckpt_path=ckpt_path)
        return grpo, history

    return run


@pytest.fixture(scope="session")
def arithmetic() -> Any:
    """The quickstart's base and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "checkpoints" / "arithmetic"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def arithmetic_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves the quickstart's base."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(ROOT / "checkpoints" / "arithmetic", log, "--enable-lora", "--max-lora-rank", "8")
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture
def stands() -> Iterator[list[Stand]]:
    """Two servers that stand in for vLLM."""
    made = [Stand(), Stand()]
    yield made
    for stand in made:
        stand.shutdown()
        stand.server_close()
