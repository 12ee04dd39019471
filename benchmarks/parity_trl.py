"""The same model, tokens, rewards and engine log-probs to TRL's ``GRPOTrainer`` and to ours under ``numerics: trl``.

    python benchmarks/parity_trl.py

Needs TRL 1.16. Of each variant it prints the largest difference of the advantages, and the relative difference of loss,
gradient and gradient norm of one optimizer step with weights that have moved away from those of the rollout; and how
far the variant moves the gradient from that of TRL's default, so that an option without effect would be seen. It ends
with an error where a difference exceeds 1e-5. Then it shows where TRL and this library differ, and what is right.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from typing import Any

import torch
from parity_sides import MODEL, Found, Rollout, make_model, run_ours, run_trl
from torch import Tensor

TOLERANCE = 1e-5


def difference(ours: Found, theirs: Found) -> tuple[float, float, float, float]:
    """Of advantages (absolute), and of loss, gradient and gradient norm (relative)."""
    norm = theirs.gradient.norm()
    return (
        float((ours.advantages - theirs.advantages).abs().max()),
        abs(ours.loss - theirs.loss) / max(abs(theirs.loss), 1e-3),
        float((ours.gradient - theirs.gradient).norm() / norm),
        float((ours.gradient.norm() - norm).abs() / norm),
    )


# Name, TRL's options, ours.
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dapo (the default)", {}, {}),
    ("grpo", {"loss_type": "grpo"}, {"loss_aggregation": "sequence_mean"}),
    ("bnpo", {"loss_type": "bnpo"}, {}),
    (
        "dr_grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"advantage_scale": "none", "loss_aggregation": "constant"},
    ),
    ("clip higher", {"epsilon_high": 0.28}, {"clip_range_high": 0.28}),
    ("two-sided clip", {"delta": 1.5}, {"dual_clip": 1.5}),
    (
        "cispo, cap 1.2",
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"surrogate": "clipped_weight", "clip_range": 1.0, "clip_range_high": 0.2},
    ),
    (
        "sequence ratio",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
        {"ratio": "sequence", "loss_aggregation": "sequence_mean", "clip_range": 3e-2, "clip_range_high": 4e-2},
    ),
    ("sequence ratio, token mean", {"importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
    ("scale: batch", {"scale_rewards": "batch"}, {"advantage_scale": "batch"}),
    ("scale: none", {"scale_rewards": "none"}, {"advantage_scale": "none"}),
    ("KL in the loss", {"beta": 0.1}, {"kl_coef": 0.1}),
    (
        "KL in the loss, plain",
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"kl_coef": 0.1, "kl_gradient": "plain"},
    ),
    ("truncated masked", {"mask_truncated_completions": True}, {"mask_truncated": True}),
    (
        "several at once",
        {"beta": 0.04, "scale_rewards": "batch", "delta": 2.0, "epsilon_high": 0.3},
        {"kl_coef": 0.04, "advantage_scale": "batch", "dual_clip": 2.0, "clip_range_high": 0.3},
    ),
]
for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
    VARIANTS.append(
        (
            f"engine correction: {mode}",
            {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5},
            {"sampling_correction": mode, "sampling_weight_max": 1.5},
        )
    )

ON_POLICY = [("top fifth by entropy", {"top_entropy_quantile": 0.2}, {"top_entropy_share": 0.2})]


def parity() -> bool:
    """Print the table of variants; whether all of them agree."""
    print(
        "| variant | advantages | loss | gradient | gradient norm | away from the default |\n|---|---|---|---|---|---|"
    )
    fine, default = True, torch.zeros(0)
    for name, theirs, ours in VARIANTS + ON_POLICY:
        rollout = Rollout(moved=0.0 if (name, theirs, ours) in ON_POLICY else 0.1)
        found = run_trl(rollout, theirs, engine=name.startswith("engine"))
        worst = difference(run_ours(rollout, ours), found)
        default = default if len(default) else found.gradient
        away = apart(found.gradient, default)
        print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in worst) + f" | {away} |", flush=True)
        fine = fine and max(worst) <= TOLERANCE and float(found.gradient.norm()) > 1e-3
    return fine


def apart(one: Tensor, other: Tensor) -> str:
    """Relative distance of two gradients."""
    return f"{float((one - other).norm() / other.norm()):.1%}"


def differences() -> None:
    """Print where the two libraries differ, with the number that shows it and the right value."""
    rollout = Rollout()
    print("\n| where | TRL | here |\n|---|---|---|")

    whole, parts = (run_trl(rollout, {"loss_type": "bnpo"}, micro_batches=n) for n in (1, 2))
    print(
        f"| `bnpo` in two micro-batches | a mean of means: the gradient moves by "
        f"{apart(parts.gradient, whole.gradient)} | the mean over the tokens of the step, whatever the micro-batches |",
        flush=True,
    )

    options = {"top_entropy_quantile": 0.2}
    whole, parts = (run_trl(rollout, options, micro_batches=n) for n in (1, 2))
    print(
        f"| top-entropy tokens in two micro-batches | a threshold for each, of the weights of the moment: the gradient "
        f"moves by {apart(parts.gradient, whole.gradient)} | one threshold for the rollout |",
        flush=True,
    )

    equal = Rollout(rewards=[0.1] * 7 + [0.7] * 7 + [0.0, 1.0] * 3 + [0.3] + [0.9] * 7, group=7)
    theirs, ours = run_trl(equal, {}), run_ours(equal, {})
    dead = [*range(14), *range(21, 28)]
    print(
        f"| groups of equal rewards (0.1, 0.7 and 0.9, seven each) | advantages up to "
        f"{float(theirs.advantages[dead].abs().max()):.1e}, of rounding "
        f"| {float(ours.advantages[dead].abs().max()):g} |",
        flush=True,
    )

    truncated = {"loss_type": "grpo", "mask_truncated_completions": True}
    theirs = run_trl(rollout, truncated)
    ours = run_ours(rollout, {"loss_aggregation": "sequence_mean", "mask_truncated": True})
    print(
        f"| `grpo` with truncated completions masked (2 of 16) | they count in the mean: {theirs.loss:.4f} "
        f"| the mean of those that are left: {ours.loss:.4f}, 16/14 of it |",
        flush=True,
    )

    together = {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.5}
    theirs = run_trl(rollout, together)
    ours = run_ours(rollout, {"ratio": "sequence", "loss_aggregation": "sequence_mean", "kl_coef": 0.5})
    print(
        f"| sequence ratio and KL in the loss | the KL is weighted by the sequence's ratio, which is not the one that "
        f"makes its gradient exact: {apart(theirs.gradient, ours.gradient)} away | by the token's |",
        flush=True,
    )

    theirs = run_trl(rollout, {"loss_type": "cispo"})
    uncapped = run_trl(rollout, {"loss_type": "cispo", "epsilon_high": 1e9})
    print(
        f"| `cispo` with `epsilon_high` left at its default | 0.2 is the cap itself: every weight is 0.2, the gradient "
        f"{float(theirs.gradient.norm() / uncapped.gradient.norm()):.0%} of the uncapped one | the cap is "
        "1 + `clip_range_high` |",
        flush=True,
    )


def main() -> None:
    """Compare, then show the differences."""
    warnings.filterwarnings("ignore")
    make_model()
    fine = parity()
    differences()
    shutil.rmtree(MODEL)
    if not fine:
        sys.exit(f"a variant differs by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
