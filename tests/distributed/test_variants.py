"""What an option takes from the whole rollout it takes from all ranks."""

from __future__ import annotations

import pytest

from tests.distributed.test_ddp import run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "module",
    [
        {"numerics": "reinforce_pp"},
        {"advantage_scale": "batch", "std_ddof": 1},
        {"top_entropy_share": 0.3},
        {"top_entropy_share": 0.3, "sampling_correction": "sequence_truncate", "kl_coef": 0.0},
    ],
    ids=str,
)
def test_two_ranks_do_what_one_does(tmp_path, policy_dir, rows, digits, module):
    """Five prompts, three on one rank and two on the other."""
    (single,) = run(tmp_path / "one", policy_dir, rows, [digits], 1, module=module)
    ranks = run(tmp_path / "two", policy_dir, rows, [digits], 2, module=module)
    expected = single["gradients"][0]
    # A sequence's weight is the exponential of a sum of log-prob differences, with the rounding of all its tokens.
    bound = 2e-6 if "sampling_correction" in module else 1e-6
    for rank in ranks:
        assert (rank["gradients"][0] - expected).norm() <= bound * expected.norm()
    for name in ("policy/entropy_threshold", "sampling/weight", "policy/advantage_abs"):
        found, wanted = (side["metrics"].get(name, 0.0) for side in (ranks[1], single))
        assert found == pytest.approx(wanted, rel=1e-5), name
