from __future__ import annotations

import pytest
import torch

from lit_rlhf.models.completions import Completions
from lit_rlhf.models.forward import completion_states
from lit_rlhf.models.layouts import decoder_of
from lit_rlhf.models.loading import load_backbone
from lit_rlhf.models.value import Critic, value_after_last


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def backbone_dir(request, tmp_path_factory) -> str:
    """Absolute and rotary positions."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.1)
        config.update({"bos_token_id": 1, "eos_token_id": 1, "initializer_range": 0.3})
        model = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        config.update({"max_position_embeddings": 64, "initializer_range": 0.3})
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return str(folder)


def critic_of(folder: str, dtype: torch.dtype = torch.float32) -> Critic:
    backbone = load_backbone(folder, dtype=dtype)
    critic = Critic(32, backbone)
    torch.nn.init.normal_(critic.head.linear.weight)
    return critic


PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 4, 5]]
COMPLETIONS = [[10, 11], [12, 13, 14, 15], [16]]


def batch() -> Completions:
    prompts = torch.zeros(3, 5, dtype=torch.long)
    completions = torch.zeros(3, 4, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        prompts[row, 5 - len(prompt) :] = torch.tensor(prompt)
        completions[row, : len(completion)] = torch.tensor(completion)
    lengths = [torch.tensor([len(x) for x in part]) for part in (PROMPTS, COMPLETIONS)]
    return Completions(prompts, lengths[0], completions, lengths[1], torch.arange(3))


def values_of(critic: Critic) -> torch.Tensor:
    return completion_states(critic.backbone, batch()).values(critic.head)


def test_padded_and_alone_agree_and_equal_a_plain_forward(backbone_dir):
    critic = critic_of(backbone_dir)
    with torch.no_grad():
        values = values_of(critic)
        assert values.shape == (3, 5)
        after = value_after_last(values, batch().completion_lengths)
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            plain = critic.backbone(input_ids=torch.tensor([prompt + completion])).last_hidden_state
            expected = critic.head(plain)[0, len(prompt) - 1 :]
            assert torch.allclose(values[row, : len(completion) + 1], expected, atol=1e-5)
            assert after[row] == pytest.approx(float(expected[-1]), abs=1e-5)


def test_train_mode_gives_the_same_values(backbone_dir):
    """The checkpoint's dropout is off."""
    critic = critic_of(backbone_dir).train()
    with torch.no_grad():
        one, two = (values_of(critic) for _ in range(2))
    assert torch.equal(one, two)


def test_values_of_a_half_precision_backbone_are_float32(backbone_dir):
    critic = critic_of(backbone_dir, torch.bfloat16)
    assert values_of(critic).dtype == torch.float32


def test_a_new_head_says_zero_everywhere():
    assert (Critic(8).head(torch.randn(2, 3, 8)) == 0).all()


def test_the_decoder_is_the_model_below_the_vocabulary_head(policy_dir):
    from lit_rlhf.models.loading import load_causal_lm
    from lit_rlhf.models.lora import add_lora

    model = load_causal_lm(policy_dir)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(decoder_of(model)(input_ids=ids).last_hidden_state, expected)
        adapted = add_lora(model, rank=2)
        assert torch.equal(decoder_of(adapted)(input_ids=ids).last_hidden_state, expected)
