"""One step's gradient does not depend on how the step is cut."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule, RolloutDataModule


class KeepGradients(L.Callback):
    """The gradients of every optimizer step, before clipping."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten() for p in pl_module.policy.parameters() if p.grad is not None]))


def gradients(make_trainer: Any, policy_dir: str, rows: Any, digits: Any, **changes: Any) -> list[torch.Tensor]:
    module_options = {"lr": 1e-5, "kl_coef": 0.1, **changes.pop("module", {})}
    trainer_options = changes.pop("trainer", {})
    keep = KeepGradients()
    data = RolloutDataModule(
        rows, rewards=[digits], prompts_per_iteration=6, group_size=4, max_new_tokens=7, seed=3, **changes
    )
    trainer = make_trainer(callbacks=[keep], **trainer_options)
    trainer.fit(GRPOModule(policy_dir, **module_options), data)
    return keep.steps


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_one_batch_equals_its_micro_batches(make_trainer, policy_dir, rows, digits, aggregation, placement):
    module = {"loss_aggregation": aggregation, "kl_placement": placement, "entropy_coef": 0.01}
    common = (make_trainer, policy_dir, rows, digits)
    (whole,) = gradients(*common, module=module)
    assert whole.norm() > 0
    for cut in (
        {"micro_batch_size": 5},
        {"micro_batch_size": 1},
        {"micro_batch_tokens": 40},
        {"trainer": {"accumulate_grad_batches": 4}},
        {"trainer": {"accumulate_grad_batches": 7}},
    ):
        (parts,) = gradients(*common, module=module, **cut)
        assert (parts - whole).norm() <= 1e-6 * whole.norm(), cut


def test_micro_batches_of_several_steps_and_passes(make_trainer, policy_dir, rows, digits):
    common = (make_trainer, policy_dir, rows, digits)
    whole = gradients(*common, passes=2, steps_per_pass=2)
    parts = gradients(*common, passes=2, steps_per_pass=2, micro_batch_size=5)
    assert len(whole) == len(parts) == 4
    assert (parts[0] - whole[0]).norm() <= 1e-6 * whole[0].norm()
    for one, other in zip(whole[1:], parts[1:], strict=True):  # Adam amplifies rounding
        assert (one - other).norm() <= 1e-4 * one.norm()


def test_two_steps_of_a_pass_add_up_to_one(make_trainer, policy_dir, rows, digits):
    """With the constant denominator the two halves of the rollout carry the whole gradient: nothing is lost."""
    module = {"loss_aggregation": "constant", "lr": 1e-12}
    common = (make_trainer, policy_dir, rows, digits)
    (whole,) = gradients(*common, module=module)
    halves = gradients(*common, module=module, steps_per_pass=2)
    assert ((halves[0] + halves[1]) / 2 - whole).norm() <= 1e-5 * whole.norm()


def test_gradient_equals_the_formula_written_out(make_trainer, policy_dir, rows, digits):
    """The pipeline's gradient against autograd on unpadded single rows, with the advantages of the rollout."""
    from transformers import AutoModelForCausalLM

    data = RolloutDataModule(
        rows, rewards=[digits], prompts_per_iteration=6, group_size=4, max_new_tokens=7, seed=3, temperature=0.7
    )
    keep = KeepGradients()
    make_trainer(callbacks=[keep]).fit(GRPOModule(policy_dir, lr=1e-5, kl_coef=0.1), data)
    rollout = data.rollout
    reference = AutoModelForCausalLM.from_pretrained(policy_dir)
    model = AutoModelForCausalLM.from_pretrained(policy_dir)

    def row_log_probs(policy: Any, row: int) -> torch.Tensor:
        prompt = rollout.prompt_ids[row, rollout.prompt_ids.shape[1] - rollout.prompt_lengths[row] :]
        completion = rollout.completion_ids[row, : rollout.completion_lengths[row]]
        logits = policy(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]

    penalised = torch.empty(len(rollout), dtype=torch.float64)
    for row in range(len(rollout)):
        with torch.no_grad():
            kl = (row_log_probs(model, row) - row_log_probs(reference, row)).sum()
        penalised[row] = rollout.rewards[row] - 0.1 * kl
    loss = 0.0
    tokens = int(rollout.completion_lengths.sum())
    for start in range(0, len(rollout), 4):
        group = penalised[start : start + 4]
        raw = rollout.rewards[start : start + 4]
        advantages = (group - group.mean()) / (group.std(correction=0) + 1e-4)
        for member in range(4):
            log_probs = row_log_probs(model, start + member)
            weight = 0.0 if raw.std(correction=0) <= 1e-6 else float(advantages[member])
            loss = loss - weight * (log_probs - log_probs.detach()).exp().sum() / tokens
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (keep.steps[0] - expected).norm() <= 1e-5 * expected.norm()


class CountTrained(L.Callback):
    """Rows of each training forward pass, and the denominator of their step."""

    def __init__(self) -> None:
        self.rows = 0
        self.denominators: list[float] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.rows += int(batch.rows.completion_mask.any(dim=1).sum())
        self.denominators.append(batch.denominator)


def half_of_the_groups_are_dead(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Late in training: the longer prompts are always solved, the shorter ones sometimes."""
    return [
        1.0 if len(prompt) > 4 else float(sum(map(ord, text)) % 2)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 5}, {"steps_per_pass": 2, "passes": 2}], ids=str)
def test_rows_without_an_advantage_are_not_run_and_change_nothing(
    make_trainer, policy_dir, rows, monkeypatch, aggregation, kl_coef, cut
):
    module = {"loss_aggregation": aggregation, "kl_coef": kl_coef, "lr": 1e-12}

    def run() -> tuple[list[torch.Tensor], int, list[float]]:
        count = CountTrained()
        found = gradients(
            lambda callbacks, **options: make_trainer(callbacks=[*callbacks, count], **options),
            policy_dir,
            rows,
            half_of_the_groups_are_dead,
            module=module,
            **cut,
        )
        return found, count.rows, sorted(set(count.denominators))

    skipped, few, denominators = run()
    monkeypatch.setattr(GRPOModule, "live_rows", lambda self, rollout: self.loss_mask(rollout).any(dim=-1))
    everything, all_rows, same_denominators = run()
    assert 0 < few < 0.7 * all_rows
    assert denominators == same_denominators
    assert any(one.norm() > 0 for one in skipped)
    for one, other in zip(skipped, everything, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("module", [{"entropy_coef": 0.01}, {"kl_placement": "loss"}])
def test_rows_that_another_term_of_the_loss_needs_are_run(make_trainer, policy_dir, rows, module):
    count = CountTrained()
    gradients(
        lambda callbacks: make_trainer(callbacks=[*callbacks, count]),
        policy_dir,
        rows,
        half_of_the_groups_are_dead,
        module=module,
    )
    assert count.rows == 24
