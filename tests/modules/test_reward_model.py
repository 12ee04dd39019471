from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from lit_rlhf import PreferenceDataModule, RewardModelModule
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.scoring import load_sequence_classifier, sequence_scores
from lit_rlhf.rewards import RewardModel

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + (a + b) % 3)}
    for a in range(6)
    for b in range(6)
]


@pytest.fixture
def module(policy_dir: str) -> RewardModelModule:
    module = RewardModelModule(policy_dir, center_coef=0.25)
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    torch.nn.init.normal_(module.model.score.weight)  # type: ignore[union-attr, arg-type]
    return module


def make_batch(padding: int = 0, pad_id: int = 0) -> dict[str, torch.Tensor]:
    chosen, rejected = [[4, 13, 5, 14, 6, 1], [7, 14, 1]], [[4, 13, 5, 14, 1], [7, 14, 8, 1]]
    width = 6 + padding
    batch = {}
    for side, rows in (("chosen", chosen), ("rejected", rejected)):
        batch[f"{side}_ids"] = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows])
        batch[f"{side}_mask"] = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    return batch


def alone(module: RewardModelModule, batch: dict[str, torch.Tensor], side: str) -> list[float]:
    """Scores of each text by itself, through plain transformers' forward."""
    rows = zip(batch[f"{side}_ids"], batch[f"{side}_mask"], strict=True)
    with torch.no_grad():
        return [module.model(input_ids=ids[mask][None]).logits.item() for ids, mask in rows]  # type: ignore[misc]


def test_loss_is_the_mean_over_pairs_with_centring_and_blind_to_padding(module: RewardModelModule) -> None:
    batch = make_batch()
    chosen, rejected = alone(module, batch, "chosen"), alone(module, batch, "rejected")
    terms = [math.log1p(math.exp(r - c)) + 0.25 * (c + r) ** 2 for c, r in zip(chosen, rejected, strict=True)]
    assert module.training_step(batch, 0).item() == pytest.approx(sum(terms) / 2, rel=1e-5)
    # Padding with the end-of-sequence id, or with a digit.
    for pad_id in (1, 9):
        padded = make_batch(padding=4, pad_id=pad_id)
        assert module.training_step(padded, 0).item() == pytest.approx(sum(terms) / 2, rel=1e-5)


def test_validation_counts_pairs_and_ties_count_half(module: RewardModelModule) -> None:
    batch = make_batch()
    difference = torch.tensor(alone(module, batch, "chosen")) - torch.tensor(alone(module, batch, "rejected"))
    tie = {name: value[:1] for name, value in batch.items()}
    tie["rejected_ids"], tie["rejected_mask"] = tie["chosen_ids"], tie["chosen_mask"]
    for part in (batch, tie):
        module.validation_step(part, 0)
    wins = (difference > 0).float().sum() + 0.5
    assert module.val_accuracy.compute().item() == pytest.approx(wins.item() / 3)
    assert module.val_margin.compute().item() == pytest.approx(difference.sum().item() / 3, rel=1e-4)
    loss = (F.softplus(-difference).sum() + math.log(2)) / 3
    assert module.val_loss.compute().item() == pytest.approx(loss.item(), rel=1e-5)  # without centring


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_score_is_read_at_the_last_token_where_padding_is_the_end_of_sequence_token(
    kind: str, tmp_path: Path, policy_dir: str
) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    source, eos = policy_dir, 1
    if kind == "gpt2":
        config = GPT2Config(vocab_size=15, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.3)
        config.num_labels = 1
        source = str(tmp_path)
        GPT2ForSequenceClassification(config).save_pretrained(source)
    torch.manual_seed(3)
    model = load_sequence_classifier(source, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = eos
    texts = [[4, eos, 5, 14, 6, eos], [4, eos], [7, 14, 8, eos, eos]]
    with torch.no_grad():
        alone = torch.cat([sequence_scores(model, torch.tensor([t]), torch.ones(1, len(t)).bool()) for t in texts])
        for padding in (0, 5):
            width = 6 + padding
            ids = torch.tensor([[*t, *[eos] * (width - len(t))] for t in texts])
            mask = torch.tensor([[i < len(t) for i in range(width)] for t in texts])
            torch.testing.assert_close(sequence_scores(model, ids, mask), alone, atol=1e-5, rtol=0)
        # What transformers' own forward reads instead: the token before the end.
        wrong = model(input_ids=ids, attention_mask=mask.long()).logits
        assert (wrong - alone).abs().min() > 1e-3


def test_a_token_that_pads_is_trained_where_it_stands_in_the_text(module: RewardModelModule) -> None:
    module.tokenizer.pad_token = module.tokenizer.eos_token
    module.model = None
    module.configure_model()
    embedding = module.model.get_input_embeddings()  # type: ignore[union-attr, operator]
    module.training_step(make_batch(), 0).backward()
    assert embedding.weight.grad[1].abs().max() > 0


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_the_exported_model_is_read_at_the_same_token(
    module: RewardModelModule, tmp_path: Path, pad_is_eos: bool
) -> None:
    from transformers import AutoModelForSequenceClassification

    if pad_is_eos:
        module.tokenizer.pad_token = module.tokenizer.eos_token
        module.model = None
        module.configure_model()
        torch.nn.init.normal_(module.model.score.weight)  # type: ignore[union-attr, arg-type]
    texts = ["1+2=3<eos>", "30+4=34<eos>"]
    rows = [module.tokenizer(text)["input_ids"] for text in texts]
    with torch.no_grad():
        expected = [module(torch.tensor([ids]), torch.ones(1, len(ids)).bool()).item() for ids in rows]
    folder = str(module.save_pretrained(tmp_path / "trained"))
    assert RewardModel(folder)(["1+2=", "30+4="], ["3", "34"]) == pytest.approx(expected, abs=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    assert [plain(torch.tensor([ids])).logits.item() for ids in rows] == pytest.approx(expected, abs=1e-5)
    if pad_is_eos:
        with pytest.raises(ValueError, match="no padding token is defined"):
            plain(torch.tensor([[*rows[0], 1, 1], rows[1]]))


def test_an_encoder_is_scored_as_its_own_forward_does(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=15, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    model = load_sequence_classifier(str(tmp_path))
    ids, mask = torch.tensor([[4, 5, 6, 9, 9]]), torch.tensor([[1, 1, 1, 0, 0]]).bool()
    with torch.no_grad():
        expected = model(input_ids=ids[:, :3]).logits
        torch.testing.assert_close(sequence_scores(model, ids, mask), expected, atol=1e-5, rtol=0)


def test_encoder_decoders_and_bad_options_are_refused(tmp_path: Path, policy_dir: str) -> None:
    from transformers import BartConfig, LlamaConfig

    BartConfig(vocab_size=15, d_model=16, encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="is an encoder-decoder"):
        load_sequence_classifier(str(tmp_path))
    LlamaConfig(architectures=["LlamaForSequenceClassification"], num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="is a classifier with other than 1 outputs"):
        load_sequence_classifier(str(tmp_path), num_labels=1)
    with pytest.raises(ConfigurationError, match="center_coef must not be negative"):
        RewardModelModule(policy_dir, center_coef=-1.0)


def test_learns_preferences_and_the_export_scores_them_alike(policy_dir: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    L.seed_everything(0)
    module = RewardModelModule(policy_dir, lr=1e-2, center_coef=0.01)
    trainer = L.Trainer(
        max_epochs=40,
        check_val_every_n_epoch=40,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, PreferenceDataModule(PAIRS, val=PAIRS, batch_size=36))
    metrics: dict[str, Any] = trainer.callback_metrics
    assert metrics["val/accuracy"] > 0.95
    assert metrics["val/loss"] < 0.2
    assert metrics["val/margin"] > 1.0
    assert [group["name"] for group in trainer.optimizers[0].param_groups] == ["reward_model"]

    folder = module.save_pretrained(tmp_path / "trained")
    reward = RewardModel(str(folder))
    prompts = [pair["prompt"] for pair in PAIRS]
    chosen, rejected = (reward(prompts, [pair[side] for pair in PAIRS]) for side in ("chosen", "rejected"))
    margin = sum(c - r for c, r in zip(chosen, rejected, strict=True)) / len(PAIRS)
    assert margin == pytest.approx(float(metrics["val/margin"]), rel=1e-4)
    assert abs(sum(chosen + rejected)) / (2 * len(PAIRS)) < 1.0  # centred
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = module.tokenizer("3+4=7<eos>", return_tensors="pt")["input_ids"]
    score = plain(ids).logits.item()
    assert reward(["3+4="], ["7"]) == [pytest.approx(score, abs=1e-5)]
