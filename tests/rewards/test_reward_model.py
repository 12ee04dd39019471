from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards import RewardModel, RewardScorer

ROOT = Path(__file__).parents[2]
TRAINED = str(ROOT / "checkpoints" / "arithmetic-reward")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '<eos>' }}{% endfor %}"
PROMPTS = ["27+38=", "1+1=", "99+99=", "5+60=", "12+34="]
ANSWERS = ["65", "2", "198", "65", ""]


@pytest.fixture(scope="module")
def make_classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def make(num_labels: int = 1, pad_is_eos: bool = False, vocab_size: int = 15, hidden: int = 32) -> str:
        from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

        folder = tmp_path_factory.mktemp("classifier")
        tokenizer = AutoTokenizer.from_pretrained(TRAINED)
        if pad_is_eos:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder)
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            num_labels=num_labels,
            pad_token_id=tokenizer.pad_token_id,
            attention_dropout=0.5,  # must be switched off
            initializer_range=0.2,
        )
        LlamaForSequenceClassification(config).save_pretrained(folder)
        return str(folder)

    return make


def reference(folder: str, text: str, label: int = 0) -> float:
    """The score of one text by plain transformers, without padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, label])


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("batch_tokens", [1, 20, 16384])
def test_scores_do_not_depend_on_neighbours_or_padding(
    make_classifier: Callable[..., str], pad_is_eos: bool, batch_tokens: int
) -> None:
    folder = make_classifier(pad_is_eos=pad_is_eos)
    expected = [reference(folder, p + a + "<eos>") for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert len({round(score, 3) for score in expected}) == len(expected)
    scores = RewardModel(folder, batch_tokens=batch_tokens)(PROMPTS, ANSWERS)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert RewardModel(folder, append_eos=False)(PROMPTS[:1], ANSWERS[:1]) == [
        pytest.approx(reference(folder, PROMPTS[0] + ANSWERS[0]), abs=1e-5)
    ]


def test_batches_stay_within_the_budget_and_hold_every_row_once() -> None:
    reward = RewardModel(TRAINED, batch_tokens=20)
    lengths = [3, 9, 30, 10, 1, 2]
    batches = reward._batches(lengths)
    assert sorted(row for batch in batches for row in batch) == list(range(6))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= 20
    assert batches == [[2], [3, 1], [0, 5, 4]]


def test_chats_are_rendered_with_the_reward_models_own_template(make_classifier: Callable[..., str]) -> None:
    folder = make_classifier()
    chats = [[{"role": "user", "content": prompt.rstrip("=")}] for prompt in PROMPTS]
    answers = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    expected = RewardModel(folder)(PROMPTS, ANSWERS)
    reward = RewardModel(folder, chat_template=TEMPLATE)
    assert reward(chats, answers) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(RewardError, match=r"`judge`: row 0: .*no chat template"):
        RewardModel(folder, name="judge")(chats, answers)
    with pytest.raises(RewardError, match="row 1: the answer is None"):
        RewardModel(folder)(PROMPTS[:2], ["1", None])


def test_the_tokenizer_may_come_from_elsewhere(make_classifier: Callable[..., str], tmp_path: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = make_classifier()
    # The same characters under other ids: the text is scored, not the ids of the policy or the model's folder.
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", "=", "+", *"9876543210"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(tmp_path)
    reward = RewardModel(folder, tokenizer=str(tmp_path))
    ids = reward.tokenizer("27+38=")["input_ids"]
    assert ids == [vocabulary[character] for character in "27+38="]
    own = RewardModel(folder)
    by_id = {index: token for token, index in own.tokenizer.get_vocab().items()}
    as_own = "".join(by_id[index] for index in [*ids, *reward.tokenizer("65")["input_ids"]])
    assert reward(["27+38="], ["65"]) == pytest.approx(own([as_own], [""]), abs=1e-6)


def test_texts_too_long_for_the_model_are_named_or_lose_their_beginning(make_classifier: Callable[..., str]) -> None:
    folder = make_classifier()
    prompt = "1+" * 20 + "1="
    with pytest.raises(RewardError, match=r"row 1 has 45 tokens, the reward model takes 32; .*`overlong: truncate`"):
        RewardModel(folder)(["1+1=", prompt], ["2", "21"])
    assert RewardModel(folder, overlong="truncate")([prompt], ["21"]) == [
        pytest.approx(
            reference(folder, (prompt + "21<eos>").replace("<eos>", "E")[-32:].replace("E", "<eos>")), abs=1e-5
        )
    ]
    with pytest.raises(RewardError, match="row 0 has 6 tokens, the reward model takes 5"):
        RewardModel(folder, max_length=5)(["1+1="], ["2"])


def test_several_outputs_need_a_label(make_classifier: Callable[..., str]) -> None:
    folder = make_classifier(num_labels=3)
    with pytest.raises(ConfigurationError, match="has 3 outputs; name the score's with `label` \\(0: LABEL_0, 1"):
        RewardModel(folder)
    with pytest.raises(ConfigurationError, match="label must lie in 0 to 2, got 3"):
        RewardModel(folder, label=3)
    assert RewardModel(folder, label=2)(["1+1="], ["2"]) == [
        pytest.approx(reference(folder, "1+1=2<eos>", label=2), abs=1e-5)
    ]


def test_a_language_model_is_no_reward_model() -> None:
    base = str(ROOT / "checkpoints" / "arithmetic")
    with pytest.raises(ConfigurationError, match="has 2 outputs"):
        RewardModel(base)
    with pytest.raises(ConfigurationError, match=r"no trained sequence classifier: it lacks score\.weight"):
        RewardModel(base, label=0)(["1+1="], ["2"])


def test_a_damaged_file_is_named(make_classifier: Callable[..., str], tmp_path: Path) -> None:
    folder = shutil.copytree(make_classifier(), tmp_path / "damaged")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match="damaged"):
        RewardModel(str(folder))(["1+1="], ["2"])


def test_what_cannot_work_is_said_before_the_weights_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder here"):
        RewardModel(str(tmp_path / "nothing"))
    for options, message in (
        ({"dtype": "int8"}, "dtype='int8' is not one of"),
        ({"quantization": "2bit"}, "quantization='2bit' is not one of"),
        ({"overlong": "cut"}, "overlong='cut' is not one of"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
        ({"max_length": 0}, "max_length must be at least 1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            RewardModel(TRAINED, **options)  # type: ignore[arg-type]
    assert RewardModel(TRAINED)._model is None


def test_the_model_is_left_out_of_gradients_and_random_numbers(make_classifier: Callable[..., str]) -> None:
    reward = RewardModel(make_classifier())
    before = torch.random.get_rng_state()
    first = reward(PROMPTS, ANSWERS)
    assert torch.equal(before, torch.random.get_rng_state())
    assert reward(PROMPTS, ANSWERS) == first
    assert not reward.model.training
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    assert reward([], []) == []


def test_is_a_reward_function_among_others() -> None:
    scorer = RewardScorer([RewardModel(TRAINED), lambda completions: [1.0] * len(completions)])
    scorer.check(["answer"])
    scores = scorer(["27+38=", "27+38="], ["65", "55"], [[9, 8], [8, 8]], {"answer": ["65", "65"]})
    assert scores.names[0] == "reward_model"
    right, forgotten = scores.components[:, 0].tolist()
    assert right > forgotten + 1.0


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_quantized_weights_score_close_to_the_full_ones(make_classifier: Callable[..., str], bits: Any) -> None:
    pytest.importorskip("bitsandbytes")
    folder = make_classifier(hidden=64)
    full = RewardModel(folder, device="cpu")(PROMPTS, ANSWERS)
    reward = RewardModel(folder, device="cpu", quantization=bits)
    scores = reward(PROMPTS, ANSWERS)
    assert type(reward.model.score) is torch.nn.Linear  # the head stays as it is
    kinds = {type(module).__name__ for module in reward.model.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}
    spread = max(full) - min(full)
    error = max(abs(a - b) for a, b in zip(scores, full, strict=True))
    assert 0.0 < error < (0.6 if bits == "4bit" else 0.1) * spread


def test_the_shipped_model_prefers_right_sums() -> None:
    import json

    path = ROOT / "recipes" / "quickstart" / "rlhf" / "data" / "preferences_val.jsonl"
    rows = [json.loads(line) for line in path.open()]
    reward = RewardModel(TRAINED)
    chosen, rejected = (reward([r["prompt"] for r in rows], [r[side] for r in rows]) for side in ("chosen", "rejected"))
    assert sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(rows) > 0.95
