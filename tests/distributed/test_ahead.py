"""Completions sampled ahead by several ranks: one checkpoint holds those of all."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.distributed.test_ddp import run
from tests.rollout.elsewhere import Elsewhere

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("devices", [1, 2])
def test_two_ranks_do_what_one_does_and_either_goes_on_from_it(tmp_path, policy_dir, rows, digits, devices):
    """Of five prompts three are the first rank's; of the sixth, in every other iteration, the second has none."""
    saving = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1, every_n_epochs=1)
    options = {"staleness": 1, "max_epochs": 4, "module": {"sampling_correction": "token_truncate", "lr": 1e-4}}

    def fit(name: str, devices: int, **more):
        return run(tmp_path / name, policy_dir, rows, [digits], devices, engine=Elsewhere(), **options, **more)

    (single,) = fit("one", 1)
    ranks = fit("two", 2, callbacks=[saving])
    assert sorted(ranks[0]["rows"] + ranks[1]["rows"]) == sorted(single["rows"])
    torch.testing.assert_close(ranks[0]["weights"], single["weights"], atol=1e-5, rtol=0)
    for epoch in (0, 1):
        resumed = fit(f"from {epoch}", devices, ckpt_path=str(tmp_path / "saved" / f"epoch={epoch}.ckpt"))
        later = [row for row in single["rows"] if row[0] > epoch]
        assert sorted(row for rank in resumed for row in rank["rows"]) == sorted(later)
        torch.testing.assert_close(resumed[0]["weights"], single["weights"], atol=1e-5, rtol=0)
