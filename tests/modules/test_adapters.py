"""Adapters of every kind that a recipe can ask for, and the reference that goes with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lit_rlhf import GRPOModule, PPOModule, RolloutBatch, SFTModule
from lit_rlhf.callbacks import RolloutCallback
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.lora import POLICY_ADAPTER, REFERENCE_ADAPTER, VALUE_ADAPTER

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])

# Options of new adapters; each must start as the base.
KINDS: dict[str, dict[str, Any]] = {
    "rank": {"lora_rank": 4},
    "rslora": {"lora_config": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True}},
    "dora": {"lora_config": {"r": 4, "target_modules": "all-linear", "use_dora": True}},
    "embeddings": {"lora_config": {"r": 4, "target_modules": ["embed_tokens", "q_proj", "lm_head"]}},
    "whole head": {"lora_config": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def adapter_dir(policy_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained adapter of the policy, with a dropout, as supervised fine-tuning with peft leaves it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=3, lora_alpha=5, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(policy_dir), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return str(folder)


class ReferenceWatch(RolloutCallback):
    """The first rollout's reference log-probs, computed again at every iteration, and the KL as it goes."""

    def __init__(self) -> None:
        self.first: RolloutBatch | None = None
        self.same: list[bool] = []
        self.first_kl = torch.nan

    def on_rollout_end(self, trainer: Any, module: Any, rollout: RolloutBatch) -> None:
        if self.first is None:
            self.first = rollout
            old = rollout.sampling_log_probs if rollout.old_log_probs is None else rollout.old_log_probs
            self.first_kl = float((old - rollout.ref_log_probs).abs()[rollout.completion_mask].max())
        again = module._reference_log_probs(self.first, [list(range(len(self.first)))])
        self.log_probs = again if not self.same else self.log_probs
        self.same.append(torch.equal(again, self.log_probs))


def base_of(module: Any) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in module.policy.named_parameters() if not p.requires_grad}


def fit(make_trainer: Any, make_data: Any, module: Any, epochs: int = 3, **options: Any) -> ReferenceWatch:
    seen = ReferenceWatch()
    data = {"prompts_per_iteration": 2, "group_size": 3, "max_new_tokens": 4, **options}
    make_trainer(max_epochs=epochs, callbacks=[seen]).fit(module, make_data(**data))
    return seen


def test_fifty_rollouts_leave_the_base_and_the_reference_alone(make_trainer, make_data, policy_dir):
    module = GRPOModule(policy_dir, lr=1e-2, lora_rank=4)
    module.configure_model()
    before, start = base_of(module), logits(module.policy)
    seen = fit(make_trainer, make_data, module, epochs=50)
    assert seen.same == [True] * 50
    after = base_of(module)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (logits(module.policy) - start).abs().max() > 0.1


def test_a_trained_adapter_is_the_start_and_the_reference(make_trainer, make_data, policy_dir, adapter_dir):
    module = GRPOModule(policy_dir, lr=1e-2, adapter=adapter_dir, kl_coef=0.1)
    module.configure_model()
    start = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy_dir), adapter_dir).eval()
    torch.testing.assert_close(logits(module.policy), logits(start), rtol=0, atol=1e-5)
    with start.disable_adapter():
        assert (logits(start) - logits(module.policy)).abs().max() > 0.1
    before = base_of(module)
    assert any(f".{REFERENCE_ADAPTER}." in name for name in before)

    seen = fit(make_trainer, make_data, module, epochs=20)
    assert seen.first_kl <= 1e-5
    assert seen.same == [True] * 20
    after = base_of(module)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (logits(module.policy) - logits(start)).abs().max() > 0.1


def test_only_the_adapter_in_training_is_in_the_checkpoint(make_trainer, make_data, policy_dir, adapter_dir, tmp_path):
    trainer = make_trainer()
    module = GRPOModule(policy_dir, lr=1e-2, adapter=adapter_dir)
    trainer.fit(module, make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    names = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert names
    assert all(f".{POLICY_ADAPTER}." in name for name in names if name.startswith("policy."))

    loaded = GRPOModule.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert torch.equal(logits(loaded.policy), logits(module.policy))
    seen = fit(make_trainer, make_data, loaded, epochs=1)
    assert seen.first_kl > 1e-3  # from where the adapter was at the very start
    plain = AutoModelForCausalLM.from_pretrained(module.save_pretrained(tmp_path / "export"))
    torch.testing.assert_close(logits(plain), logits(module.policy), rtol=0, atol=1e-5)


def test_a_critic_beside_a_trained_adapter(make_trainer, make_data, policy_dir, adapter_dir):
    module = PPOModule(policy_dir, lr=1e-2, critic_lr=1e-2, critic="adapter", adapter=adapter_dir)
    seen = fit(make_trainer, make_data, module, epochs=3, passes=2)
    assert set(module.policy.peft_config) == {POLICY_ADAPTER, REFERENCE_ADAPTER, VALUE_ADAPTER}
    assert seen.first_kl <= 1e-5
    assert seen.same == [True] * 3
    policy, value = module.parameter_groups()
    assert len(policy["params"]) > 0
    assert len(value["params"]) == len(policy["params"]) + 2


def test_supervised_training_goes_on_from_an_adapter_without_a_reference(policy_dir, adapter_dir):
    module = SFTModule(policy_dir, adapter=adapter_dir)
    module.configure_model()
    assert set(module.policy.peft_config) == {POLICY_ADAPTER}
    assert all("lora_" in name for name, p in module.policy.named_parameters() if p.requires_grad)
    assert not any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.policy.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_switched_off_every_adapter_is_the_base(make_trainer, make_data, policy_dir, tmp_path, kind):
    module = GRPOModule(policy_dir, lr=2e-2, kl_coef=0.1, **KINDS[kind])
    seen = fit(make_trainer, make_data, module, epochs=4)
    assert seen.first_kl <= 1e-5
    assert seen.same == [True] * 4
    base = logits(AutoModelForCausalLM.from_pretrained(policy_dir))
    with module.policy.disable_adapter():
        assert torch.equal(logits(module.policy), base)
    trained = logits(module.policy)
    assert (trained - base).abs().max() > 1e-2
    plain = AutoModelForCausalLM.from_pretrained(module.save_pretrained(tmp_path))
    torch.testing.assert_close(logits(plain), trained, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["dora", "whole head"])
def test_a_critic_of_each_kind_learns_by_itself(make_trainer, make_data, policy_dir, kind):
    module = PPOModule(policy_dir, lr=1e-2, critic_lr=1e-2, critic="adapter", critic_warmup_iterations=2, **KINDS[kind])
    fit(make_trainer, make_data, module, epochs=2)
    base = logits(AutoModelForCausalLM.from_pretrained(policy_dir))
    torch.testing.assert_close(logits(module.policy), base, rtol=0, atol=1e-5)
    value = [p for name, p in module.policy.named_parameters() if f".{VALUE_ADAPTER}." in name and "lora_B" in name]
    assert any(bool((p != 0).any()) for p in value)


def test_a_configuration_file_is_as_good_as_the_options(policy_dir, adapter_dir):
    by_file = GRPOModule(policy_dir, lora_config=str(Path(adapter_dir) / "adapter_config.json"))
    assert (by_file.lora_rank, by_file.lora_alpha) == (3, 5)
    by_file.configure_model()
    trained = {name.split(".lora_")[0] for name, p in by_file.policy.named_parameters() if p.requires_grad}
    assert {name.rsplit(".", 1)[1] for name in trained} == {"q_proj", "v_proj", "up_proj"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 4, "lora_config": {"r": 4}}, "lora_config says what the adapter is: leave lora_rank out"),
        ({"lora_alpha": 4.0, "adapter": True}, "adapter says what the adapter is: leave lora_alpha out"),
        ({"lora_config": {"r": 4}, "adapter": True}, "lora_config says what the adapter is: leave adapter out"),
        ({"lora_config": {"r": 4, "bias": "all"}}, "bias must be 'none'"),
        ({"adapter": "nowhere"}, "nowhere: no adapter can be read there"),
    ],
)
def test_one_place_says_what_the_adapter_is(policy_dir, adapter_dir, options, message):
    options = {name: adapter_dir if value is True else value for name, value in options.items()}
    with pytest.raises(ConfigurationError, match=message):
        GRPOModule(policy_dir, **options)


def test_an_adapter_of_another_model_is_refused(policy_dir, adapter_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(Path(adapter_dir) / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((Path(adapter_dir) / "adapter_config.json").read_text())
    module = GRPOModule(policy_dir, adapter=str(tmp_path))
    with pytest.raises(ConfigurationError, match="cannot be loaded into this policy"):
        module.configure_model()
    name = next(iter(weights))
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match="does not fit this policy: 1 of its weights are missing, 0 have no"):
        GRPOModule(policy_dir, adapter=str(tmp_path)).configure_model()
    save_file({**weights, name: weights[name].repeat(1, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match="cannot be loaded into this policy: Error"):
        GRPOModule(policy_dir, adapter=str(tmp_path)).configure_model()


def test_another_adapter_is_another_run(make_trainer, make_data, policy_dir, adapter_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    trainer = make_trainer()
    trainer.fit(GRPOModule(policy_dir, adapter=adapter_dir), make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text((Path(adapter_dir) / "adapter_config.json").read_text())
    weights = load_file(Path(adapter_dir) / "adapter_model.safetensors")
    save_file({name: value * 1.1 for name, value in weights.items()}, other / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match=r"the checkpoint is of another run \(adapter: "):
        make_trainer(max_epochs=2).fit(
            GRPOModule(policy_dir, adapter=str(other)), make_data(), ckpt_path=tmp_path / "x.ckpt"
        )
