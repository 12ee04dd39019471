"""Every published variant learns the quickstart's task; ``pytest -m slow -s`` prints the table of docs/variants.md."""

from __future__ import annotations

import time
from pathlib import Path

import lightning as L
import pytest

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.modules.presets import PRESETS
from lit_rlhf.rewards import MathAnswer

ROOT = Path(__file__).parents[2]
DATA = ROOT / "recipes" / "quickstart" / "data"
VARIANTS = {name: {"numerics": name} for name in PRESETS} | {
    "median baseline": {"baseline": "median"},
    "batch scale": {"advantage_scale": "batch"},
    "top fifth by entropy": {"top_entropy_share": 0.2},
    "KL in the loss, k2": {"kl_placement": "loss", "kl_estimator": "k2"},
    "return-to-go": {"decomposition": "return_to_go"},
}


class MostClipped(L.Callback):
    """The largest clip fraction of an iteration: at the end the learning rate is 0, and nothing is clipped."""

    value = 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.value = max(self.value, pl_module.iteration_values["policy/clip_fraction"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", VARIANTS)
def test_it_learns(name, make_trainer):
    """Thirty iterations of the quickstart, two optimizer steps on each rollout: only then do ratio and clip matter."""
    L.seed_everything(1, verbose=False)
    data = RolloutDataModule(
        DATA / "train.jsonl",
        val=DATA / "val.jsonl",
        rewards=MathAnswer(),
        prompts_per_iteration=64,
        group_size=8,
        max_new_tokens=8,
        steps_per_pass=2,
        val_samples=2,
    )
    clipped = MostClipped()
    trainer = make_trainer(max_epochs=30, check_val_every_n_epoch=30, callbacks=[clipped])
    module = GRPOModule(str(ROOT / "checkpoints" / "arithmetic"), lr=3e-4, **VARIANTS[name])
    started = time.perf_counter()
    trainer.fit(module, data)
    found = {metric: float(value) for metric, value in trainer.callback_metrics.items()}
    greedy, sampled = (f"{found[f'val/{kind}']:.3f}" for kind in ("accuracy", "sampled_accuracy"))
    kl = f"{found['kl']:.2f}" if "kl" in found else "-"
    print(  # noqa: T201
        f"\n| {name} | {greedy} | {sampled} | {kl} | {clipped.value:.3f} | {time.perf_counter() - started:.0f} s |"
    )
    before = module.initial_metrics
    assert found["val/accuracy"] >= before["val/accuracy"] + 0.2
    assert found["val/sampled_accuracy"] >= before["val/sampled_accuracy"] + 0.1
