"""Models, configurations and ids as they come from a folder."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.loading import context_length, eos_token_ids, load_causal_lm, load_config, load_tokenizer

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


@pytest.fixture
def save(tmp_path, make_model):
    """Save the model with changed settings in its config.json; the folder's name."""

    def save(name, **changes):
        folder = tmp_path / name
        make_model(name).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return str(folder)

    return save


def random_passes_differ(model):
    with torch.no_grad():
        return not torch.equal(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("gpt2", {"resid_pdrop": 0.1}),
        ("gpt2", {"embd_pdrop": 0.1}),
        ("gpt2", {"attn_pdrop": 0.1}),
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
        ("llama", {"attention_dropout": 0.3}),
    ],
    ids=str,
)
def test_dropout_is_off_in_train_mode(save, make_model, name, rates):
    from transformers import AutoModelForCausalLM

    folder = save(name, **rates)
    assert random_passes_differ(AutoModelForCausalLM.from_pretrained(folder).train()), "the saved rates must matter"
    model = load_causal_lm(folder)
    assert model.training
    assert not random_passes_differ(model)
    with torch.no_grad():
        in_train_mode = model(IDS).logits
        assert torch.equal(model.eval()(IDS).logits, in_train_mode)
        assert torch.equal(make_model(name)(IDS).logits, in_train_mode)


def _tiny_opt():
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=40,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=16,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=64,
        dropout=0.0,
        layerdrop=0.5,
    )


def _tiny_phimoe():
    from transformers import PhimoeConfig

    return PhimoeConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        router_jitter_noise=0.3,
        input_jitter_noise=0.3,
    )


def _tiny_nested_gemma3():
    from transformers import Gemma3Config

    text = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "attention_dropout": 0.3,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Gemma3Config(text_config=text, vision_config=vision, image_token_index=39)


@pytest.mark.parametrize("make", [_tiny_opt, _tiny_phimoe], ids=["layer dropout", "router noise"])
def test_other_noise_of_train_mode_is_off_too(tmp_path, make):
    from transformers import AutoModelForCausalLM

    make().save_pretrained(tmp_path)
    noisy = AutoModelForCausalLM.from_config(make()).train()
    assert random_passes_differ(noisy)
    model = load_causal_lm(str(tmp_path), random_init=True)
    assert model.training
    assert not random_passes_differ(model)


def test_dropout_of_a_nested_configuration_is_off(tmp_path):
    _tiny_nested_gemma3().save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    assert config.text_config.attention_dropout == 0.0
    assert config.text_config.rms_norm_eps == 1e-6
    assert context_length(config) == config.text_config.max_position_embeddings


def test_only_the_rates_are_changed(save):
    from transformers import AutoConfig

    folder = save("gpt2", resid_pdrop=0.1, embd_pdrop=0.2)
    original, loaded = AutoConfig.from_pretrained(folder).to_dict(), load_config(folder).to_dict()
    changed = {name for name in original if original[name] != loaded[name]}
    assert {"resid_pdrop", "embd_pdrop"} <= changed
    assert all(loaded[name] == 0.0 and "drop" in name for name in changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("random_init", [False, True])
def test_weights_have_the_type_asked_for(save, dtype, random_init):
    model = load_causal_lm(save("llama"), dtype=dtype, random_init=random_init)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_float32_is_the_default_whatever_was_saved(tmp_path, make_model):
    make_model("llama").bfloat16().save_pretrained(tmp_path)
    assert load_causal_lm(str(tmp_path)).lm_head.weight.dtype == torch.float32


def test_random_init_draws_new_weights_of_the_saved_architecture(save, make_model):
    folder, original = save("llama"), make_model("llama")
    assert torch.equal(load_causal_lm(folder).lm_head.weight, original.lm_head.weight)
    torch.manual_seed(5)
    one = load_causal_lm(folder, random_init=True)
    torch.manual_seed(5)
    two = load_causal_lm(folder, random_init=True)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, original.lm_head.weight)
    shapes = {name: weight.shape for name, weight in original.state_dict().items()}
    assert {name: weight.shape for name, weight in one.state_dict().items()} == shapes
    assert one.training


@pytest.mark.parametrize("random_init", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_asked_for_is_used(save, random_init, attention):
    model = load_causal_lm(save("llama"), random_init=random_init, attn_implementation=attention)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(
    ("load", "what"), [(load_config, "model"), (load_causal_lm, "model"), (load_tokenizer, "tokenizer")]
)
def test_a_missing_folder_is_named(tmp_path, load, what):
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigurationError) as caught:
        load(missing)
    assert str(caught.value).startswith(f"Cannot load a {what} from {missing!r} (no such folder here)")


@pytest.mark.parametrize(("load", "what"), [(load_causal_lm, "model"), (load_tokenizer, "tokenizer")])
def test_an_empty_folder_is_not_called_missing(tmp_path, load, what):
    with pytest.raises(ConfigurationError, match=rf"Cannot load a {what} .*the folder exists"):
        load(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path, make_model):
    make_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Cannot load a causal language model .*the folder exists"):
        load_causal_lm(str(tmp_path))


def test_every_id_that_ends_a_completion_is_found(save, make_model):
    from transformers import GenerationConfig

    folder = save("llama", eos_token_id=2)
    GenerationConfig(eos_token_id=[9, 5]).save_pretrained(folder)
    config = load_config(folder)
    assert eos_token_ids(folder, config, SimpleNamespace(eos_token_id=7)) == (2, 5, 7, 9)
    assert eos_token_ids(folder, config, SimpleNamespace(eos_token_id=None)) == (2, 5, 9)
    assert eos_token_ids(folder, config, None) == (2, 5, 9)


def test_id_zero_counts_and_nothing_at_all_is_an_empty_tuple(tmp_path, make_model):
    config = copy.deepcopy(make_model("llama").config)
    config.eos_token_id = None
    assert eos_token_ids(str(tmp_path), config, None) == ()
    assert eos_token_ids(str(tmp_path), config, SimpleNamespace(eos_token_id=0)) == (0,)
    config.eos_token_id = [3, 0]
    assert eos_token_ids(str(tmp_path), config, SimpleNamespace(eos_token_id=3)) == (0, 3)


def test_context_length_by_its_names(make_model):
    from transformers import BloomConfig

    assert context_length(make_model("gpt2").config) == 64
    assert context_length(make_model("llama").config) == 64
    assert context_length(BloomConfig()) is None
