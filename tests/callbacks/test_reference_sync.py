from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import AutoModelForCausalLM

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.callbacks import ReferenceSync, RolloutCallback
from lit_rlhf.errors import ConfigurationError


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Both(RolloutCallback):
    """Reference and policy as each rollout sees them."""

    def __init__(self):
        self.references, self.policies = [], []

    def on_rollout_end(self, trainer, module, rollout):
        self.references.append(flat(module.reference.model))
        self.policies.append(flat(module.policy))


def test_a_copy_every_other_iteration(fit, watch):
    both = Both()
    fit(None, [ReferenceSync(every_n_iterations=2), both], max_epochs=5)
    start = both.policies[0]
    expected = [start, start, both.policies[2], both.policies[2], both.policies[4]]
    assert all(torch.equal(one, other) for one, other in zip(both.references, expected, strict=True))
    assert not torch.equal(both.policies[4], both.policies[2])
    # The rollout right after a copy is sampled by the reference itself.
    kl = [(r.sampling_log_probs - r.ref_log_probs).abs().max() for r in watch.rollouts]
    assert [float(gap) < 1e-5 for gap in kl] == [True, False, True, False, True]


def test_a_moving_average(fit):
    both = Both()
    fit(None, [ReferenceSync(weight=0.25), both], max_epochs=4)
    reference = both.policies[0]
    for own, policy in zip(both.references[1:], both.policies[1:], strict=True):
        reference = 0.75 * reference + 0.25 * policy
        assert torch.allclose(own, reference, atol=1e-6)
    assert (both.references[3] - both.references[0]).norm() > 1e-3


def test_the_policy_gets_further_away_from_its_start(fit):
    """A strong penalty against a fixed reference holds it; against one that follows it does not."""
    options = {"module": {"lr": 1e-3, "kl_coef": 2.0, "kl_placement": "loss"}, "max_epochs": 12}
    held, followed = Both(), Both()
    fit(None, [held], **options)
    fit(None, [ReferenceSync(), followed], **options)
    distances = [(both.policies[-1] - both.policies[0]).norm() for both in (held, followed)]
    assert distances[1] > 1.1 * distances[0]


@pytest.mark.parametrize("options", [{"every_n_iterations": 2}, {"weight": 0.1}])
def test_resume_continues_with_the_reference(resumed_equals_uninterrupted, make_data, policy_dir, options):
    logged, folder = resumed_equals_uninterrupted(lambda: [ReferenceSync(**options)], make_data, lr=1e-2)
    assert len({metrics["kl"] for metrics in logged}) > 3
    saved = torch.load(folder / "epoch=4.ckpt", weights_only=True)
    (reference,) = [state["reference"] for name, state in saved["callbacks"].items() if "ReferenceSync" in name]
    start = AutoModelForCausalLM.from_pretrained(policy_dir).state_dict()
    assert any(not torch.equal(reference[name], start[name]) for name in start)


def test_a_run_of_its_own_starts_from_the_start(fit, policy_dir):
    """The same callback in a second run, or after the validation of a checkpoint, restores nothing."""
    sync = ReferenceSync()
    fit(None, [sync], max_epochs=2)
    both = Both()
    fit(None, [sync, both], max_epochs=1)
    assert torch.equal(both.references[0], flat(AutoModelForCausalLM.from_pretrained(policy_dir)))


def test_ppo_too(make_trainer, make_data, policy_dir):
    both = Both()
    module = PPOModule(policy_dir, lr=1e-2, critic="shared")
    make_trainer(callbacks=[ReferenceSync(), both], max_epochs=3).fit(module, make_data(passes=2, micro_batch_size=5))
    assert all(torch.equal(one, other) for one, other in zip(both.references, both.policies, strict=True))


@pytest.mark.distributed
def test_two_ranks_share_one_reference(tmp_path, make_trainer, make_data, policy_dir):
    class Save(Both):
        def on_train_end(self, trainer, pl_module):
            torch.save(self.references, tmp_path / f"{trainer.world_size}-{trainer.global_rank}")

    for devices in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        trainer = make_trainer(callbacks=[ReferenceSync(weight=0.5), Save()], max_epochs=3, **devices)
        trainer.fit(GRPOModule(policy_dir, lr=1e-4), make_data())
    single, first, second = (torch.load(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    for alone, mine, others in zip(single, first, second, strict=True):
        assert torch.equal(mine, others)
        assert torch.allclose(alone, mine, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_iterations": 0}, "ReferenceSync: every_n_iterations must be a number in"),
        ({"weight": 0.0}, r"ReferenceSync: weight must be a number in \(0, 1\], got 0"),
        ({"weight": 1.5}, r"ReferenceSync: weight must be a number in \(0, 1\], got 1.5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ReferenceSync(**options)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"kl_coef": 0.0}, "with kl_coef=0 there is no reference to move"),
        ({"lora_rank": 4}, "with lora_rank the reference is the base model with the adapter switched off"),
    ],
)
def test_refused_before_a_model_is_loaded(make_trainer, make_data, policy_dir, module, message):
    grpo = GRPOModule(policy_dir, **module)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(callbacks=[ReferenceSync()]).fit(grpo, make_data())
    assert grpo.policy is None


def test_sharded_weights_are_refused(make_trainer, policy_dir):
    trainer = make_trainer()
    trainer.strategy.__class__ = type("Sharding", (ModelParallelStrategy,), {})
    with pytest.raises(ConfigurationError, match="Sharding shards the reference"):
        ReferenceSync().setup(trainer, GRPOModule(policy_dir), "fit")
