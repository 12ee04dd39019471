"""From a file to an optimizer step: layouts train, and one list of ids serves sampler, policy and reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf import PPOModule
from lit_rlhf.data.prompts import encode_prompt
from lit_rlhf.engines import TransformersEngine
from lit_rlhf.rewards import MathAnswer

Make = Callable[..., Any]
LAYOUTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "layouts.json").read_text(encoding="utf-8"))
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
OWN_SYSTEM = [{"role": "system", "content": "Answer in French."}, *CHAT]


@pytest.fixture(scope="session")
def make_policy(make_tokenizer: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A tiny random Llama that reads bytes, by default with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made: dict[str, str] = {}

    def make(**options: Any) -> str:
        if (key := repr(options)) not in made:
            folder = tmp_path_factory.mktemp("reader")
            tokenizer = make_tokenizer(**options)
            tokenizer.save_pretrained(folder)
            torch.manual_seed(1)
            config = LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=1024,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
                initializer_range=0.3,
            )
            LlamaForCausalLM(config).save_pretrained(folder)
            made[key] = str(folder)
        return made[key]

    return make


class RecordingEngine(TransformersEngine):
    """The policy's own engine; keeps the prompts that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, ...]] = []

    def generate(self, policy: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        self.given += [tuple(ids) for ids in prompts]
        return super().generate(policy, prompts, *args, **kwargs)


def spread(completions: list[Any]) -> list[float]:
    """Differs inside groups."""
    return [float(row % 3) for row in range(len(completions))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_one_iteration_from_a_file(
    name: str, make_policy: Any, make_data: Any, fit: Any, weights: Any, tmp_path: Path
) -> None:
    layout, seen = LAYOUTS[name], {}
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in layout["rows"]))

    def remember(completions: list[Any], **columns: Any) -> list[float]:
        seen.update(columns)
        return spread(completions)

    rewards: list[Any] = [remember]
    if layout["format"] in ("gsm8k", "verl", "math", "openr1_math", "dapo_math"):
        rewards += [MathAnswer(), MathAnswer(answer_column="gold")]
    data = make_data(file, rewards=rewards, format=layout["format"], prompts_per_iteration=2)
    module = fit(data, policy=make_policy(), max_epochs=1)
    assert module.trainer.global_step == 1
    before = torch.cat([p.flatten() for p in type(module.policy).from_pretrained(make_policy()).parameters()])
    assert not torch.equal(weights(module), before)
    # Every row got its own prompt's values, of the file's types.
    for column, values in seen.items():
        for index, value in zip(data.rollout.prompt_index.tolist(), values, strict=True):
            row = layout["rows"][index]
            assert column in ("prompts", "completion_ids", "gold", "answer") or value == row[column]
            assert column not in row or type(value) is type(row[column])


SITUATIONS: dict[str, dict[str, Any]] = {
    "text": {"train": ["2+2=", "a much longer prompt", "é🙂"]},
    "text, tokenizer adds specials": {"train": ["2+2=", "<s>ab", "ab</s>"], "tokenizer": {"bos": True, "eos": True}},
    "chat": {"train": [{"prompt": CHAT}, {"prompt": OWN_SYSTEM}]},
    "chat, tokenizer adds specials": {"train": [{"prompt": CHAT}], "tokenizer": {"bos": True, "eos": True}},
    "chat, pad is eos": {"train": [{"prompt": CHAT}], "tokenizer": {"pad": "</s>"}},
    "system prompt": {"train": [{"prompt": CHAT}, {"prompt": OWN_SYSTEM}], "system_prompt": "Be brief."},
    "text as chat": {"train": ["2+2=", "more"], "as_chat": True, "system_prompt": "Be brief."},
    "template": {"train": [{"target": 24, "nums": [3, 8]}], "prompt_template": "{{ target }}: {{ nums }}"},
    "format": {"train": LAYOUTS["countdown"]["rows"], "format": "countdown", "as_chat": True},
    "template's variables": {
        "train": [{"prompt": CHAT}],
        "chat_template_options": {"think": True},
        "tokenizer": {"template": "{{ messages[0]['content'] }}{% if think %}<unk>{% endif %}<assistant>"},
    },
    "cut text": {"train": ["0123456789", "abc"], "max_prompt_length": 6, "overlong_prompts": "cut"},
    "cut chat": {"train": [{"prompt": OWN_SYSTEM}], "max_prompt_length": 30, "overlong_prompts": "cut"},
    "dropped": {"train": ["0123456789", "abc"], "max_prompt_length": 6},
    "stop string": {"train": ["2+2="], "stop": "a"},
}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_sampler_policy_and_reference_get_the_same_ids(
    name: str, algorithm: str, make_policy: Any, make_data: Any, fit: Any, make_trainer: Any, watch: Any
) -> None:
    options = dict(SITUATIONS[name])
    policy = make_policy(**options.pop("tokenizer", {}))
    engine = RecordingEngine()
    data = make_data(**options, rewards=spread, engine=engine, prompts_per_iteration=3, passes=2, shuffle=False)
    if algorithm == "grpo":
        module: Any = fit(data, policy=policy, max_epochs=1)
    else:
        module = PPOModule(policy, lr=1e-3)
        make_trainer(callbacks=[watch], max_epochs=1).fit(module, data)
    prompts = data.prompts["train"].prompts
    tokenizer = module.tokenizer
    assert engine.given == [prompt.ids for prompt in prompts]
    for prompt in prompts:
        said = options.get("chat_template_options")
        assert prompt.ids == encode_prompt(tokenizer, prompt.text, chat_template_options=said)

    (rollout,) = watch.rollouts
    model = type(module.policy).from_pretrained(policy).eval()
    ids_of = {prompt.index: prompt.ids for prompt in prompts}
    for row in range(len(rollout)):
        length, size = int(rollout.prompt_lengths[row]), int(rollout.completion_lengths[row])
        ids = rollout.prompt_ids[row, rollout.prompt_ids.shape[1] - length :].tolist()
        assert tuple(ids) == ids_of[int(rollout.prompt_index[row])]
        # Log-probs say which ids a model has read: those of the very prompt, unpadded and alone.
        completion = rollout.completion_ids[row, :size]
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor(ids), completion])[None]).logits[0, length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        for used in (rollout.sampling_log_probs, rollout.ref_log_probs, rollout.old_log_probs):
            torch.testing.assert_close(used[row, :size], expected, atol=1e-5, rtol=0)
    if options.get("system_prompt"):
        roles = [[message["role"] for message in prompt.text] for prompt in prompts]
        assert all(found.count("system") == 1 for found in roles)
