from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf.data.supervised import SupervisedDataModule
from lit_rlhf.modules.sft import SFTModule

CHARACTERS = ["<pad>", "<eos>", *"0123456789+="]
ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(5) for b in range(5)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    inner = Tokenizer(models.WordLevel({token: index for index, token in enumerate(CHARACTERS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        attention_dropout=0.5,  # must be switched off
    ).save_pretrained(folder)
    return folder


def make_batch(padding: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, 3 + 2 and 2 + 2 tokens of prompt and completion, with padding that holds a real token's id."""
    ids = torch.tensor([[2, 12, 3, 5, 1], [4, 13, 7, 1, 1]])
    attention = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    completion = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 0]]).bool()
    extra = torch.full((2, padding), 9)
    none = torch.zeros(2, padding, dtype=torch.bool)
    return {
        "input_ids": torch.cat([ids, extra], dim=1),
        "attention_mask": torch.cat([attention, none], dim=1),
        "completion_mask": torch.cat([completion, none], dim=1),
    }


@pytest.fixture
def module(model_folder: Path) -> SFTModule:
    torch.manual_seed(0)
    module = SFTModule(str(model_folder), random_init=True)
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module


def test_loss_is_the_mean_over_completion_tokens_and_blind_to_padding(module: SFTModule) -> None:
    batch = make_batch()
    loss = module.training_step(batch, 0)
    total, count = 0.0, 0
    for row in range(2):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        log_probs = module.policy(input_ids=ids[None]).logits[0].double().log_softmax(dim=-1)
        for position in range(1, length):
            if batch["completion_mask"][row, position]:
                total -= log_probs[position - 1, ids[position]].item()
                count += 1
    assert count == 4
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    assert module.training_step(make_batch(padding=3), 0).item() == pytest.approx(loss.item(), rel=1e-5)


def test_prompt_tokens_get_no_gradient_through_the_loss(module: SFTModule) -> None:
    batch = make_batch()
    batch["completion_mask"][:] = False
    loss = module.training_step(batch, 0)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


def test_validation_counts_tokens_not_batches(module: SFTModule) -> None:
    batch = make_batch()
    module.validation_step(batch, 0)
    whole = (module.val_loss.compute().item(), module.val_token_accuracy.compute().item())
    assert whole[0] == pytest.approx(module.training_step(batch, 0).item(), rel=1e-5)
    module.val_loss.reset()
    module.val_token_accuracy.reset()
    # The same tokens, cut unevenly: one batch with one row twice has more tokens than the other.
    first = {name: value[[0, 0, 1]] for name, value in batch.items()}
    second = {name: value[[1]] for name, value in batch.items()}
    for part in (first, second):
        module.validation_step(part, 0)
    assert module.val_loss.compute().item() == pytest.approx(whole[0], rel=1e-5)
    assert module.val_token_accuracy.compute().item() == pytest.approx(whole[1])


def test_learns_to_add_and_to_stop(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    L.seed_everything(0)
    module = SFTModule(str(model_folder), random_init=True, lr=1e-2)
    data = SupervisedDataModule(ROWS, val=ROWS, batch_size=25)
    trainer = L.Trainer(
        max_epochs=120,
        check_val_every_n_epoch=120,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, data)
    metrics: dict[str, Any] = trainer.callback_metrics
    assert metrics["val/loss"] < 0.1
    assert metrics["val/token_accuracy"] > 0.98

    folder = module.save_pretrained(tmp_path / "trained")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("2+4=", return_tensors="pt")["input_ids"]
    completion = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(completion) == "6<eos>"
