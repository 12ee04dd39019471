from __future__ import annotations

import subprocess
import sys
from typing import Any

import bitsandbytes
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lit_rlhf import GRPOModule
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.modules.optimizers import check_optimizer, make_optimizer


@pytest.fixture(scope="module")
def wider_policy(policy_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With weights large enough for moments in 8 bits."""
    folder = tmp_path_factory.mktemp("wider")
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_eight_bits_step_nearly_as_thirty_two_do():
    start = torch.randn(64, 128)
    found = {}
    for name in ("adamw", "adamw_8bit"):
        torch.manual_seed(2)
        weight = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer(name, [weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(5):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        found[name] = weight.detach() - start
    assert (found["adamw_8bit"] - found["adamw"]).norm() < 0.1 * found["adamw"].norm()
    assert not torch.equal(found["adamw_8bit"], found["adamw"])


def test_a_run_with_eight_bit_moments_resumes_exactly(make_trainer, make_data, wider_policy, tmp_path, weights):
    def run(ckpt_path: str | None = None) -> Any:
        torch.manual_seed(4)
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = make_trainer(max_epochs=4, callbacks=[saving], enable_checkpointing=True)
        module = GRPOModule(wider_policy, lr=1e-2, optimizer="adamw_8bit")
        trainer.fit(module, make_data(), ckpt_path=ckpt_path)
        return trainer, module

    trainer, whole = run()
    (optimizer,) = trainer.optimizers
    assert isinstance(getattr(optimizer, "optimizer", optimizer), bitsandbytes.optim.AdamW8bit)
    assert {state["state1"].dtype for state in optimizer.state.values()} == {torch.uint8, torch.float32}
    assert [group["name"] for group in optimizer.param_groups] == ["policy"]
    _, resumed = run(str(tmp_path / "epoch=1.ckpt"))
    assert torch.equal(weights(resumed), weights(whole))


def test_no_pages_on_a_cpu(make_trainer, make_data, policy_dir):
    module = GRPOModule(policy_dir, optimizer="paged_adamw_8bit")
    with pytest.raises(
        ConfigurationError, match=r"optimizer: paged_adamw_8bit .* this run is on a CPU: write adamw_8bit"
    ):
        make_trainer().fit(module, make_data())
    assert module.policy is None


def test_no_sharded_weights(make_trainer, make_data, policy_dir, fsdp2_of_one):
    module = GRPOModule(policy_dir, optimizer="adamw_8bit")
    with pytest.raises(ConfigurationError, match="optimizer: adamw_8bit cannot update weights that are sharded"):
        make_trainer(strategy=fsdp2_of_one).fit(module, make_data())
    assert module.policy is None


def test_evaluation_needs_no_optimizer(make_trainer, make_data, policy_dir, rows):
    module = GRPOModule(policy_dir, optimizer="paged_adamw_8bit")
    assert make_trainer().validate(module, make_data(val=rows), verbose=False)


def test_a_build_of_bitsandbytes_that_lacks_the_device_is_told_before_a_model_is_loaded(monkeypatch):
    def lacking(self: Any) -> None:
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", lacking)
    with pytest.raises(
        ConfigurationError, match="does not run on cpu, bitsandbytes says: no kernel for this device; wr"
    ):
        check_optimizer("adamw_8bit", torch.device("cpu"), sharded=False)
    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", lambda self: None)
    with pytest.raises(ConfigurationError, match="does nothing on cpu"):
        check_optimizer("adamw_8bit", torch.device("cpu"), sharded=False)


def test_other_names_are_refused(policy_dir):
    with pytest.raises(
        ConfigurationError, match="optimizer must be one of adamw, adamw_8bit, paged_adamw_8bit, got 'sgd'"
    ):
        GRPOModule(policy_dir, optimizer="sgd")


def test_adamw_imports_no_bitsandbytes():
    code = (
        "import sys, torch; from lit_rlhf.modules.optimizers import make_optimizer, check_optimizer; "
        "check_optimizer('adamw', torch.device('cpu'), False); "
        "make_optimizer('adamw', [torch.nn.Parameter(torch.ones(1))], lr=1.0, fused=True).step(); "
        "print('bitsandbytes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False"
