"""Runs that end early, start again, or are picked up in another way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from transformers import AutoModelForCausalLM

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.errors import ConfigurationError, RewardError

IDS = torch.tensor([[3, 4, 5, 6]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.0}, {"lora_rank": 4}])
def test_a_checkpoint_loads_and_exports_without_a_trainer(make_trainer, make_data, policy_dir, tmp_path, options):
    trainer = make_trainer(max_epochs=2)
    trained = GRPOModule(policy_dir, lr=1e-2, **options)
    trainer.fit(trained, make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = GRPOModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert torch.equal(logits(loaded.policy), logits(trained.policy))
    plain = AutoModelForCausalLM.from_pretrained(loaded.save_pretrained(tmp_path / "export"))
    assert torch.allclose(logits(plain), logits(trained.policy), atol=1e-5)


def test_an_exported_adapter_is_a_policy_like_any_other(make_trainer, make_data, policy_dir, tmp_path):
    """Merged; the critic's adapter is not in it, and the module that was exported is as before."""
    module = PPOModule(policy_dir, lr=1e-2, critic_lr=1e-2, critic="adapter", lora_rank=4)
    make_trainer(max_epochs=2).fit(module, make_data(passes=2))
    before = logits(module.policy)
    folder = module.save_pretrained(tmp_path / "export")
    assert torch.equal(logits(module.policy), before)
    assert not list(folder.rglob("adapter*"))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(plain), before, atol=1e-5)
    assert (logits(AutoModelForCausalLM.from_pretrained(policy_dir)) - before).abs().max() > 1e-4
    make_trainer().fit(GRPOModule(str(folder)), make_data())


def test_a_folder_with_an_adapter_alone_is_explained(make_trainer, make_data, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="holds a low-rank adapter, not a model: merge it"):
        make_trainer().fit(GRPOModule(str(tmp_path)), make_data())


def test_a_checkpoint_of_an_adapter_has_no_frozen_base(make_trainer, make_data, policy_dir, tmp_path):
    trainer = make_trainer()
    trainer.fit(GRPOModule(policy_dir, lora_rank=4), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    names = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert any("lora_A" in name for name in names)
    assert not any("base_layer" in name or "embed" in name for name in names)


@pytest.mark.parametrize("alpha", [0.5, 7.9])
def test_lora_alpha_is_taken_as_it_is(make_trainer, make_data, policy_dir, alpha):
    module = GRPOModule(policy_dir, lora_rank=4, lora_alpha=alpha)
    make_trainer().fit(module, make_data())
    layer = module.policy.get_base_model().model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == pytest.approx(alpha / 4)


def test_a_stop_inside_an_iteration_waits_for_its_end(make_trainer, make_data, policy_dir, tmp_path):
    class StopEarly(ModelCheckpoint):
        def on_train_batch_end(self, trainer, *args, **kwargs):
            trainer.should_stop = True

    saving = StopEarly(dirpath=tmp_path, filename="{epoch}-{step}", save_on_train_epoch_end=True, every_n_epochs=1)
    trainer = make_trainer(max_epochs=5, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(GRPOModule(policy_dir), make_data(micro_batch_size=5, passes=2))
    assert trainer.global_step == 2
    assert trainer.current_epoch == 1
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=2.ckpt"]


def test_max_time_ends_with_a_whole_iteration(make_trainer, make_data, policy_dir):
    trainer = make_trainer(max_time={"seconds": 1}, max_epochs=10**6)
    trainer.fit(GRPOModule(policy_dir, warmup_ratio=0.0), make_data(micro_batch_size=5, passes=2))
    assert trainer.global_step % 2 == 0
    assert not trainer.datamodule.mid_iteration


def test_one_datamodule_serves_two_runs(make_trainer, make_data, policy_dir, watch):
    """The second starts from the first iteration, with its own rollouts and its critic's warm-up."""
    data = make_data()
    make_trainer(max_epochs=3).fit(GRPOModule(policy_dir), data)
    module = PPOModule(policy_dir, critic_warmup_iterations=2, lr=1e-2)
    make_trainer(max_epochs=2, callbacks=[watch]).fit(module, data)
    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    assert torch.equal(logits(module.policy), logits(base))
    assert data.iteration == 2


def test_a_datamodule_does_not_keep_the_ids_of_another_tokenizer(make_trainer, make_data, policy_dir, tmp_path):
    from transformers import AutoTokenizer

    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(policy_dir).save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    text = (Path(policy_dir) / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer.save_pretrained(other)
    one, two = (f'"{digit}": {tokenizer.convert_tokens_to_ids(digit)}' for digit in "12")
    swapped = text.replace(one, "HERE").replace(two, f'"2": {one.split()[1]}').replace("HERE", f'"1": {two.split()[1]}')
    assert swapped != text
    (other / "tokenizer.json").write_text(swapped, encoding="utf-8")
    data = make_data([{"prompt": "12="}])
    make_trainer().fit(GRPOModule(policy_dir), data)
    first = data.prompts["train"][0].ids
    make_trainer().fit(GRPOModule(str(other)), data)
    assert data.prompts["train"][0].ids == (first[1], first[0], first[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"group_size": 2}, "group_size: 4 -> 2"),
        ({"prompts_per_iteration": 3}, "prompts_per_iteration: 6 -> 3"),
    ],
)
def test_another_sequence_of_prompts_is_refused_on_resume(
    make_trainer, make_data, policy_dir, tmp_path, change, message
):
    trainer = make_trainer()
    trainer.fit(GRPOModule(policy_dir), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(max_epochs=2).fit(GRPOModule(policy_dir), make_data(**change), ckpt_path=tmp_path / "x.ckpt")


def test_validation_after_fit_keeps_the_totals(make_trainer, make_data, policy_dir, rows, tmp_path):
    trainer, module, data = make_trainer(), GRPOModule(policy_dir), make_data(val=rows)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    tokens = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["Throughput"]["tokens"]
    assert tokens["generated"] == float(data.rollout.completion_lengths.sum())


def test_scoring_passes_are_no_larger_than_training_ones(make_trainer, make_data, policy_dir, monkeypatch):
    import lit_rlhf.models.forward as forward

    sizes: list[tuple[bool, int]] = []
    original = forward.completion_outputs

    def recorded(model, rows, *args, **kwargs):
        sizes.append((torch.is_grad_enabled(), len(rows)))
        return original(model, rows, *args, **kwargs)

    for module in ("base", "scored_policy"):
        monkeypatch.setattr(f"lit_rlhf.modules.{module}.completion_outputs", recorded)
    make_trainer().fit(GRPOModule(policy_dir), make_data(steps_per_pass=3))
    assert [size for trained, size in sizes if trained] == [8, 8, 8]
    assert {size for trained, size in sizes if not trained} == {8}


def test_fast_dev_run_with_several_steps(make_trainer, make_data, policy_dir):
    trainer = make_trainer(fast_dev_run=True)
    trainer.fit(GRPOModule(policy_dir), make_data(passes=2))
    assert trainer.global_step == 1


def test_an_accumulation_scheduler_is_refused(make_trainer, make_data, policy_dir):
    with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler cannot go with rollouts"):
        make_trainer(callbacks=[GradientAccumulationScheduler({0: 2})]).fit(GRPOModule(policy_dir), make_data())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GRPOModule, {"kl_coef": float("nan")}, r"kl_coef must be a number in \[0, inf\), got nan"),
        (GRPOModule, {"entropy_coef": -0.1}, "entropy_coef must be a number"),
        (GRPOModule, {"std_ddof": 9}, r"std_ddof must be a number in \[0, 1\], got 9"),
        (GRPOModule, {"max_skipped_steps": 0}, r"max_skipped_steps must be a number in \[1, inf\), got 0"),
        (GRPOModule, {"weight_decay": -1.0}, "weight_decay must be a number"),
        (GRPOModule, {"lora_rank": 4, "lora_alpha": 0.0}, r"lora_alpha must be a number in \(0, inf\), got 0"),
        (GRPOModule, {"random_init": True}, "reinforcement learning starts from a trained model"),
        (PPOModule, {"critic_max_grad_norm": -1.0}, r"critic_max_grad_norm must be a number in \(0, inf\), got -1"),
        (PPOModule, {"value_coef": -1.0}, "value_coef must be a number"),
    ],
)
def test_numbers_out_of_range(policy_dir, kind, options, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(policy_dir, **options)


def test_a_reward_that_fails_says_so(make_trainer, make_data, policy_dir):
    def broken(completions):
        raise ValueError("no service")

    with pytest.raises(RewardError, match=r"broken.*no service"):
        make_trainer().fit(GRPOModule(policy_dir), make_data(rewards=[broken]))
