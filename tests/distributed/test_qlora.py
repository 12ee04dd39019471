"""A quantised base on each of two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_ddp import run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_two_ranks_do_what_one_does(tmp_path, policy_dir, rows, digits, kind):
    options = {"module": {"lora_rank": 4, "quantization": kind, "lr": 1e-3}, "max_epochs": 2}
    torch.manual_seed(3)
    (single,) = run(tmp_path / "one", policy_dir, rows, [digits], 1, **options)
    torch.manual_seed(3)
    ranks = run(tmp_path / "two", policy_dir, rows, [digits], 2, **options)
    expected = single["gradients"][0]
    for rank in ranks:
        assert (rank["gradients"][0] - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert torch.allclose(ranks[0]["weights"], single["weights"], atol=2e-5)
