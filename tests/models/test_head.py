"""Log-probs from the vocabulary head alone against those of the model's own logits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from lit_rlhf.functional import entropy as exact_entropy
from lit_rlhf.functional import token_log_probs
from lit_rlhf.models.head import vocabulary_head
from lit_rlhf.models.layouts import decoder_of
from lit_rlhf.models.lora import add_lora, without_adapter
from tests.models.zoo import TINY

VOCAB = 53
_COMMON = {**TINY, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.25}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8}
# Configuration, what is special about it, and the scale and soft cap that it ends in.
SEPARABLE: dict[str, tuple[str, dict[str, Any], float, float | None]] = {
    "llama": ("LlamaConfig", {}, 1.0, None),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}, 1.0, None),
    "qwen3": ("Qwen3Config", {"head_dim": 8}, 1.0, None),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, 1.0, None),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, 1.0, None),
    "gpt-neox": ("GPTNeoXConfig", {}, 1.0, None),
    "opt": ("OPTConfig", {"ffn_dim": 48}, 1.0, None),
    "opt-projected": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 16}, 1.0, None),
    "phi-bias": ("PhiConfig", {}, 1.0, None),
    "mamba": ("MambaConfig", {}, 1.0, None),
    "bart": ("BartConfig", {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48}, 1.0, None),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 3.0}, 1.0, 3.0),
    "gemma3-uncapped": ("Gemma3TextConfig", {"head_dim": 8, "final_logit_softcapping": None}, 1.0, None),
    "recurrent-gemma": ("RecurrentGemmaConfig", {"lru_width": 32, "logits_soft_cap": 4.0}, 1.0, 4.0),
    "cohere": ("CohereConfig", {"logit_scale": 0.125}, 0.125, None),
    # The same word in two configurations: one divides by it, one multiplies.
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}, 1 / 3, None),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 3.0}, 3.0, None),
    "falcon-h1": ("FalconH1Config", {"lm_head_multiplier": 0.3, **_MAMBA}, 0.3, None),
}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
# Why each cannot be separated.
INSEPARABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "minicpm3": (
        "MiniCPM3Config",
        {**_LATENT, "num_key_value_heads": 4, "head_dim": 4, "scale_emb": 2, "dim_model_base": 8},
        "does not see just the last hidden state",
    ),
    "bert": ("BertConfig", {"is_decoder": True}, "does not see just the last hidden state"),
    "dory": ("DoryConfig", {}, "no plain linear layer but of type DoryLMHead"),
}


def build(name: str, **change: Any) -> Any:
    import transformers

    kind, special = {**SEPARABLE, **INSEPARABLE}[name][:2]
    config = getattr(transformers, kind)(**{**_COMMON, **special, **change})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)
    return model.eval()


def batch():
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(3, VOCAB, (2, 3, 9), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}, targets


def from_head(model, temperature=0.7):
    """Log-probs and entropies of a batch by the decoder and the head."""
    inputs, targets = batch()
    return vocabulary_head(model).log_probs(
        decoder_of(model)(**inputs).last_hidden_state, targets, temperature, "train"
    )


def from_logits(model, temperature=0.7):
    """The same by the model's own logits."""
    inputs, targets = batch()
    logits = model(**inputs).logits
    return token_log_probs(logits, targets, temperature), exact_entropy(logits, temperature)


def assert_same(model, atol=2e-5):
    outputs, expected = from_head(model), from_logits(model)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=atol)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    factors = torch.linspace(-1, 2, 27).view(3, 9)
    grads, expected_grads = (
        torch.autograd.grad((factors * (pair[0] + pair[1])).sum(), parameters, allow_unused=True)
        for pair in (outputs, expected)
    )
    largest = max(float(grad.abs().max()) for grad in expected_grads if grad is not None)
    for one, two in zip(grads, expected_grads, strict=True):
        if two is None or one is None:
            assert one is two
        else:
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", SEPARABLE)
def test_values_and_gradients_equal_those_of_the_models_own_logits(name):
    model = build(name)
    head = vocabulary_head(model)
    assert head is not None
    assert head.linear is model.get_output_embeddings()
    assert head.scale == pytest.approx(SEPARABLE[name][2], rel=1e-6)
    assert head.softcap == (None if SEPARABLE[name][3] is None else pytest.approx(SEPARABLE[name][3], rel=1e-6))
    assert_same(model)


@pytest.mark.parametrize("name", INSEPARABLE)
def test_what_cannot_be_separated_is_refused_with_one_line(name, caplog):
    model = build(name)
    with caplog.at_level("INFO"):
        assert vocabulary_head(model) is None
        assert vocabulary_head(model) is None
    lines = [record.getMessage() for record in caplog.records if type(model).__name__ in record.getMessage()]
    assert len(lines) == 1
    assert INSEPARABLE[name][2] in lines[0]


def test_a_tied_weight_gets_both_gradients():
    model = build("llama-tied")
    embedding = model.get_input_embeddings().weight
    assert vocabulary_head(model).linear.weight is embedding
    both = torch.autograd.grad(from_head(model)[0].sum(), embedding)[0]
    expected = torch.autograd.grad(from_logits(model)[0].sum(), embedding)[0]
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    inputs, targets = batch()
    hidden = decoder_of(model)(**inputs).last_hidden_state
    head_alone = vocabulary_head(model).log_probs(hidden.detach(), targets, 0.7)[0]
    one = torch.autograd.grad(head_alone.sum(), embedding)[0]
    assert (both - one).abs().max() > 0.05 * both.abs().max()


@pytest.mark.parametrize("untrained", [False, True])
def test_a_softcap_or_scale_is_measured_whatever_the_size_of_the_weights(untrained):
    change = {"initializer_range": 1e-4} if untrained else {}
    assert vocabulary_head(build("gemma2", **change)).softcap == pytest.approx(3.0)
    assert vocabulary_head(build("cohere", **change)).scale == 0.125


class Answering(nn.Module):
    """A language model whose logits come out of a function of its head's output."""

    def __init__(self, inner, answer):
        super().__init__()
        self.inner, self.answer = inner, answer
        self.base_model = inner.base_model

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, **inputs):
        outputs = self.inner(**inputs)
        outputs.logits = self.answer(outputs.logits)
        return outputs


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda z: z, (1.0, None)),
        (lambda z: -2.0 * z, (-2.0, None)),
        (lambda z: 5 * torch.tanh(3 * z / 5), (3.0, 5.0)),
        (lambda z: z + 1, None),
        (lambda z: z.clamp(-50, 50), None),
        (lambda z: z.log_softmax(-1), None),
        (lambda z: z * torch.linspace(0.9, 1.1, z.shape[-1]), None),
        (lambda z: z[..., :-1], None),
        (lambda z: z + (torch.arange(z.shape[-1]) == 7) * 1e-3, None),
        (lambda z: z.sign() * z.abs().sqrt(), None),
    ],
)
def test_what_follows_the_head_is_a_scale_and_a_soft_cap_or_nothing(answer, expected):
    head = vocabulary_head(Answering(build("llama"), answer))
    assert expected == (None if head is None else (pytest.approx(head.scale), head.softcap))


def test_a_head_that_runs_twice_is_refused():
    class Twice(Answering):
        def forward(self, **inputs):
            self.inner(**inputs)
            return self.inner(**inputs)

    assert vocabulary_head(Twice(build("llama"), None)) is None


def test_a_model_that_fails_when_tried_out_is_refused(caplog):
    def fail(logits):
        raise RuntimeError("no such thing")

    with caplog.at_level("INFO"):
        assert vocabulary_head(Answering(build("llama"), fail)) is None
    assert "RuntimeError: no such thing" in caplog.text


def test_something_hooked_to_the_head_is_not_bypassed():
    model = build("llama")
    assert vocabulary_head(model) is not None
    with model.lm_head.register_forward_hook(lambda module, arguments, output: output + 1):
        assert vocabulary_head(model) is None
    assert vocabulary_head(model) is not None


def test_the_model_runs_only_once_to_be_measured_and_is_not_kept():
    model = build("llama")
    runs = []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    weight = model.lm_head.weight.clone()
    for _ in range(3):
        vocabulary_head(model)
    assert len(runs) == 1
    torch.testing.assert_close(model.lm_head.weight, weight, rtol=0, atol=0)
    assert not model.lm_head._forward_hooks
    handle.remove()

    import weakref

    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_measuring_draws_no_random_number():
    model = build("llama")
    state = torch.get_rng_state()
    vocabulary_head(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_bfloat16(name):
    model = build(name).bfloat16()
    head = vocabulary_head(model)
    # Exact: it is measured on numbers wider than the model's.
    assert head.scale == pytest.approx(SEPARABLE[name][2], rel=1e-9)
    with torch.no_grad():
        outputs, expected = from_head(model), from_logits(model)
        exact = from_logits(build(name).bfloat16().float())
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    if name == "llama":  # rounded at the same places
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-4)
    else:  # the model's own scale and cap round once more
        assert (outputs[0] - exact[0]).abs().mean() < 1.2 * (expected[0] - exact[0]).abs().mean()


def test_under_autocast():
    model = build("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert vocabulary_head(model) is not None
        with torch.no_grad():
            outputs, expected = from_head(model), from_logits(model)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-4)


def adapted(target_modules="all-linear", name="llama"):
    model = add_lora(build(name), rank=4, target_modules=target_modules)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_below_the_head_stay_in_place(name):
    model = adapted(name=name)
    assert vocabulary_head(model) is not None
    assert not vocabulary_head(model).linear.weight.requires_grad
    assert_same(model)
    with torch.no_grad():
        with_adapter = from_head(model)[0]
        with without_adapter(model):
            bare = from_head(model)
            torch.testing.assert_close(bare, from_logits(model), rtol=0, atol=2e-5)
        torch.testing.assert_close(bare, from_logits(build(name)), rtol=0, atol=2e-5)
    assert (with_adapter - bare[0]).abs().max() > 0.1


def test_an_adapter_on_the_head_is_not_bypassed():
    model = build("llama")
    assert vocabulary_head(model) is not None
    assert vocabulary_head(add_lora(model, rank=4, target_modules=["q_proj", "lm_head"])) is None


def test_a_copy_has_a_head_of_its_own():
    import copy

    model = build("cohere")
    vocabulary_head(model)
    reference = copy.deepcopy(model)
    assert vocabulary_head(reference).linear is reference.lm_head
    assert vocabulary_head(reference).scale == 0.125


def test_models_without_a_vocabulary_have_no_head():
    assert vocabulary_head(nn.Linear(2, 3)) is None
    assert vocabulary_head(build("llama").base_model) is None
