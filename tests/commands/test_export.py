"""The exported folder is the trained policy, for libraries that know nothing of this one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lit_rlhf import PPOModule, SFTModule
from lit_rlhf.commands.restoring import merge_exactly
from lit_rlhf.data.supervised import SupervisedDataModule
from lit_rlhf.models.lora import add_lora

QUICKSTART_MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
IDS = torch.arange(3, 13)[None]


@torch.no_grad()
def logits(folder, kind=AutoModelForCausalLM):
    return kind.from_pretrained(folder)(IDS).logits


@torch.no_grad()
def own_logits(module):
    return module.policy.eval()(IDS).logits


@pytest.fixture
def talkative(policy_dir, tmp_path):
    """A base with a chat template and a generation config of its own."""
    folder = tmp_path / "base"
    shutil.copytree(policy_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[1, 3], temperature=0.5, do_sample=True, pad_token_id=0).save_pretrained(folder)
    return str(folder)


def test_all_weights(train, export, tmp_path, talkative):
    checkpoint, module = train(policy=talkative)
    code, said = export(checkpoint, tmp_path / "out")
    assert (code, said.strip()) == (0, f"Policy of {checkpoint} written to {tmp_path / 'out'}")
    assert torch.equal(logits(tmp_path / "out"), own_logits(module))
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "run" / "policy"))
    assert not torch.equal(logits(tmp_path / "out"), logits(talkative))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("12+3=").input_ids == module.tokenizer("12+3=").input_ids
    assert tokenizer.chat_template == module.tokenizer.chat_template
    written = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (written.eos_token_id, written.temperature) == ([1, 3], 0.5)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_the_base_is_not_read_where_every_weight_is_in_the_checkpoint(train, export, tmp_path, talkative):
    checkpoint, module = train(policy=talkative)
    Path(talkative, "model.safetensors").unlink()
    assert export(checkpoint, tmp_path / "out")[0] == 0
    assert torch.equal(logits(tmp_path / "out"), own_logits(module))


def test_large_models_are_cut_into_several_files(train, export, tmp_path):
    checkpoint, module = train()
    assert export(checkpoint, tmp_path / "out", "--max_shard_size", "30KB")[0] == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) >= 2
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert torch.equal(logits(tmp_path / "out"), own_logits(module))


def test_an_adapter_is_written_without_its_base(train, export, tmp_path, talkative):
    checkpoint, module = train(policy=talkative, lora_rank=2, lora_alpha=6.0)
    Path(talkative, "model.safetensors").rename(tmp_path / "hidden")
    assert "has changed" in export(checkpoint, tmp_path / "out")[1]
    Path(tmp_path / "hidden").rename(Path(talkative, "model.safetensors"))
    code, said = export(checkpoint, tmp_path / "out")
    assert code == 0
    assert said.startswith("Adapter of rank 2 of ")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    # With the base that the folder names, and with one that is given.
    torch.testing.assert_close(logits(tmp_path / "out", AutoPeftModelForCausalLM), own_logits(module))
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(talkative), tmp_path / "out")(
            IDS
        ).logits
    torch.testing.assert_close(loaded, own_logits(module))
    assert (loaded - logits(talkative)).abs().max() > 1e-3


def test_a_merged_adapter_is_the_policy_that_fit_exports(train, export, tmp_path):
    checkpoint, module = train(lora_rank=2)
    code, said = export(checkpoint, tmp_path / "out", "--merge")
    assert code == 0
    assert said.startswith("Policy with its adapter of rank 2 merged of ")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "run" / "policy"))
    torch.testing.assert_close(logits(tmp_path / "out"), own_logits(module), rtol=1e-4, atol=1e-4)


def test_of_a_critic_on_the_same_base_nothing_is_left(train, export, tmp_path):
    checkpoint, module = train(PPOModule, lora_rank=2, critic="adapter")
    assert export(checkpoint, tmp_path / "out")[0] == 0
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert list(loaded.peft_config) == ["default"]
    torch.testing.assert_close(logits(tmp_path / "out", AutoPeftModelForCausalLM), own_logits(module))


def test_the_type_of_the_weights_can_be_chosen(train, export, tmp_path):
    checkpoint, _ = train(dtype="bfloat16", lora_rank=2)
    for name, options, dtype in (("a", [], torch.bfloat16), ("b", ["--dtype", "float32"], torch.float32)):
        assert export(checkpoint, tmp_path / name, "--merge", *options)[0] == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    exact, rounded = logits(tmp_path / "b"), logits(tmp_path / "a")
    assert 0 < (exact - rounded.float()).abs().max() < 0.1 * exact.abs().max()


def test_merging_rounds_each_weight_once(policy_dir):
    torch.manual_seed(0)
    model = add_lora(AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.bfloat16), 4)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    for name in ("lora_A", "lora_B"):
        torch.nn.init.normal_(getattr(layer, name)["default"].weight)
    base = layer.base_layer.weight.detach().clone()
    product = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    merged = merge_exactly(model, torch.bfloat16).model.layers[0].self_attn.q_proj.weight
    exact = base.float() + 2 * product.detach()
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, exact.to(torch.bfloat16))


def test_a_quantised_base_is_made_whole_before_merging(train, export, tmp_path):
    checkpoint, module = train(lora_rank=2, quantization="4bit")
    assert export(checkpoint, tmp_path / "out", "--merge")[0] == 0
    assert "| base in training | 4bit |" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    merged = logits(tmp_path / "out")
    torch.testing.assert_close(merged, logits(tmp_path / "run" / "policy"), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(merged, own_logits(module), rtol=1e-3, atol=1e-3)
    # The adapter itself is loaded onto the base as it was before.
    assert export(checkpoint, tmp_path / "adapter")[0] == 0
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    trained = {name: value for name, value in module.policy.named_parameters() if value.requires_grad}
    own = dict(loaded.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in trained.items())


def test_training_that_went_on_from_an_adapter(train, export, tmp_path):
    checkpoint, module = train(lora_config={"r": 3, "use_rslora": True})
    assert export(checkpoint, tmp_path / "first")[0] == 0
    checkpoint, module = train(adapter=str(tmp_path / "first"))
    assert export(checkpoint, tmp_path / "second")[0] == 0
    torch.testing.assert_close(logits(tmp_path / "second", AutoPeftModelForCausalLM), own_logits(module))


def test_the_card_says_what_was_done(train, export, tmp_path, policy_dir):
    checkpoint, module = train(kl_coef=0.07)
    export(checkpoint, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    metrics = module.trainer.callback_metrics
    accuracy, low, high = (metrics[f"val/accuracy{end}"] for end in ("", "_low", "_high"))
    best = module.trainer.checkpoint_callback.best_model_score
    for line in (
        "library_name: transformers",
        "| algorithm | GRPO |",
        "| iterations | 2 |",
        "| optimizer steps | 2 |",
        '| rewards, with weights | {"share_of_digits": 1.0} |',
        "| kl_coef | 0.07 |",
        "| group_size | 4 |",
        "| lr | 0.01 |",
        f"| val/accuracy | {accuracy:.4g}, {low:.4g} to {high:.4g} (after step 2) |",
        f"| val/accuracy, best of the run | {best:.4g} |",
        f"Policy from `{policy_dir}`.",
    ):
        assert line in card.splitlines(), line
    assert "base_model:" not in card  # no name of the Hub


def test_a_supervised_policy_from_new_weights(tmp_path, export, make_trainer):
    """Its base is a configuration and a tokenizer alone."""
    module = SFTModule(str(QUICKSTART_MODEL), random_init=True, lr=1e-3)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, SupervisedDataModule([{"prompt": "1+1=", "completion": "2"}] * 4))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert export(tmp_path / "x.ckpt", tmp_path / "out")[0] == 0
    assert torch.equal(logits(tmp_path / "out"), own_logits(module))


def test_a_folder_that_holds_something_is_refused(train, export, tmp_path):
    checkpoint, module = train()
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("ten years")
    code, said = export(checkpoint, out)
    assert (code, said) == (
        1,
        f"lit-rlhf: error: --out {out}: the folder is not empty; name another, or add --overwrite\n",
    )
    assert "holds something else" in export(checkpoint, out, "--overwrite")[1]
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    assert "this is a file" in export(checkpoint, out / "thesis.txt")[1]
    # A model is replaced as a whole.
    (out / "thesis.txt").rename(out / "config.json")
    (out / "model-00001-of-00002.safetensors").write_text("old")
    assert export(checkpoint, out, "--overwrite")[0] == 0
    assert not (out / "model-00001-of-00002.safetensors").exists()
    assert torch.equal(logits(out), own_logits(module))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]


def test_the_base_is_never_replaced(train, export, talkative):
    checkpoint, _ = train(policy=talkative)
    code, said = export(checkpoint, talkative, "--overwrite")
    assert code == 1
    assert "is needed" in said
    assert Path(talkative, "model.safetensors").exists()


def test_a_failed_export_leaves_what_was_there(train, export, tmp_path, monkeypatch):
    checkpoint, _ = train()
    out = tmp_path / "out"
    assert export(checkpoint, out)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*args):
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("lit_rlhf.checkpointing.atomic._sync", fail)
    code, said = export(checkpoint, out, "--overwrite")
    assert code == 1
    assert "No space left" in said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]


@pytest.mark.parametrize("moved", ["gone", "another"])
def test_a_base_that_is_gone_or_another(moved, train, export, tmp_path, talkative):
    checkpoint, module = train(policy=talkative, lora_rank=2)
    kept = Path(talkative).rename(tmp_path / "kept")
    if moved == "another":
        shutil.copytree(kept, talkative)
        model = AutoModelForCausalLM.from_pretrained(talkative)
        model.model.norm.weight.data += 1
        model.save_pretrained(talkative)
    code, said = export(checkpoint, tmp_path / "out", "--merge")
    assert code == 1
    assert ("--base" if moved == "gone" else "has changed") in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert export(checkpoint, tmp_path / "out", "--merge", "--base", kept)[0] == 0
    torch.testing.assert_close(logits(tmp_path / "out"), own_logits(module), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_exported_is_said_in_one_line(train, export, tmp_path, make_trainer):
    checkpoint, _ = train()
    saved = torch.load(checkpoint, weights_only=True)
    name = "policy.model.norm.weight"
    lacking = {**saved, "state_dict": {key: value for key, value in saved["state_dict"].items() if key != name}}
    foreign = {**saved, "state_dict": {**saved["state_dict"], "policy.surplus": torch.zeros(1)}}
    classifier = {**saved, "hyper_parameters": {"model": "x"}}
    for content, options, expected in (
        (saved, ["--merge"], "has no adapter, leave it out"),
        (lacking, [], "lacks 1 weights"),
        (foreign, [], "'surplus' is no weight of it"),
        (classifier, [], "and no policy"),
        ("no checkpoint", [], "Lightning did not write this checkpoint"),
    ):
        torch.save(content, tmp_path / "bad.ckpt")
        code, said = export(tmp_path / "bad.ckpt", tmp_path / "out", *options)
        assert code == 1
        assert expected in said
        assert len(said.splitlines()) == 1
        assert not (tmp_path / "out").exists()
    assert "there is no such checkpoint" in export(tmp_path / "nowhere.ckpt", tmp_path / "out")[1]


def test_options_of_other_modules_do_not_matter():
    """A subclass of the user's has hyperparameters that nobody here knows."""
    from lit_rlhf.commands.restoring import _known

    known = _known({"policy": "x", "lora_rank": 3, "temperament": "mild", "random_init": True, "kl_coef": 1.0})
    assert known == {"policy": "x", "lora_rank": 3, "lr": 1.0}
