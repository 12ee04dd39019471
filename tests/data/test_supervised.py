from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_rlhf.data.encoding import encode_prompt
from lit_rlhf.data.supervised import SupervisedDataModule
from lit_rlhf.errors import ConfigurationError, DataError

Make = Callable[..., Any]
ROWS = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "25+25=", "completion": "50"},
    {"prompt": "1=", "completion": ""},
]


def ready(tokenizer: Any, train: Any, stage: str = "fit", **options: Any) -> SupervisedDataModule:
    data = SupervisedDataModule(train, **options)
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(tokenizer=tokenizer))
    data.setup(stage)
    return data


@pytest.mark.parametrize("pad", ["<pad>", "</s>", None])
def test_masks_come_from_lengths_whatever_the_padding_id(make_tokenizer: Make, pad: str | None) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True, pad=pad)
    data = ready(tokenizer, ROWS, val=ROWS)
    batch = next(iter(data.val_dataloader()))
    ids, attention, completion = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    lengths = [5 + 1 + 1, 7 + 2 + 1, 3 + 0 + 1]
    assert ids.shape == attention.shape == completion.shape == (3, 10)
    assert attention.dtype == completion.dtype == torch.bool
    assert attention.sum(dim=1).tolist() == lengths
    assert completion.sum(dim=1).tolist() == [2, 3, 1]  # the end-of-sequence token counts
    for row, length in enumerate(lengths):
        assert attention[row, :length].all()
        assert ids[row, length - 1] == tokenizer.eos_token_id
        assert completion[row, length - 1]
        prompt = encode_prompt(tokenizer, ROWS[row]["prompt"])
        assert tuple(ids[row, : len(prompt)].tolist()) == prompt
        assert not completion[row, : len(prompt)].any()
        assert tokenizer.decode(ids[row][completion[row]][:-1]) == ROWS[row]["completion"]
    assert len(tokenizer) == len(make_tokenizer(pad=pad))


def test_messages_are_encoded_like_prompts(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos=True)
    chat = [{"role": "user", "content": "2+2?"}]
    answer = [{"role": "assistant", "content": "4"}]
    batch = ready(tokenizer, [{"q": chat, "a": answer}], prompt_column="q", completion_column="a")
    (ids,) = next(iter(batch.train_dataloader()))["input_ids"].tolist()
    assert tuple(ids[:-2]) == encode_prompt(tokenizer, chat)
    assert tokenizer.decode(ids[-2:]) == "4</s>"


def test_training_order_is_shuffled_by_the_seed_and_differs_between_epochs(make_tokenizer: Make) -> None:
    rows = [{"prompt": "a", "completion": str(number)} for number in range(50)]

    def order(seed: int) -> list[list[int]]:
        loader = ready(make_tokenizer(), rows, seed=seed, batch_size=50).train_dataloader()
        return [next(iter(loader))["input_ids"].tolist() for _ in range(2)]

    first, again, other = order(0), order(0), order(1)
    assert first == again
    assert first[0] != other[0]
    assert first[0] != first[1]
    assert sorted(first[0]) == sorted(other[0])


def test_sizes_of_batches(make_tokenizer: Make) -> None:
    rows = ROWS * 3
    data = ready(make_tokenizer(), rows, val=rows, batch_size=4, val_batch_size=5)
    assert [len(batch["input_ids"]) for batch in data.train_dataloader()] == [4, 4, 1]
    assert [len(batch["input_ids"]) for batch in data.val_dataloader()] == [5, 4]
    assert ready(make_tokenizer(), rows).val_dataloader() == []


def test_only_what_the_stage_needs_is_read(make_tokenizer: Make) -> None:
    data = ready(make_tokenizer(), "does/not/exist.jsonl", stage="validate", val=ROWS)
    assert len(data.val_dataloader().dataset) == 3


def test_rows_over_the_limit_are_left_out(make_tokenizer: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        data = ready(make_tokenizer(), ROWS, max_length=6)
    assert len(data.train_dataloader().dataset) == 2  # 6 tokens are still allowed
    assert caplog.messages == ["iterable: 1 of 3 rows longer than 6 tokens dropped, longest 9"]
    with pytest.raises(DataError, match=r"3 of 3 rows longer than 2 tokens, none is left; raise `max_length`"):
        ready(make_tokenizer(), ROWS, max_length=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "", "completion": "a"}, "iterable, row 2, column 'prompt': the prompt is an empty string"),
        ({"prompt": "\ud83d", "completion": "a"}, "iterable, row 2, column 'prompt': the tokenizer cannot read"),
        ({"prompt": "a", "completion": 4}, r"iterable, row 2, column 'completion': the completion is 4 \(int\)"),
        ({"prompt": "a"}, "iterable, row 2, column 'completion': the completion is None"),
        (
            {"prompt": "a", "completion": [{"role": "user", "content": "b"}]},
            "iterable, row 2, column 'completion': .*one message from the assistant",
        ),
    ],
)
def test_unusable_rows_are_named(make_tokenizer: Make, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ready(make_tokenizer(), [ROWS[0], row])


def test_missing_columns_name_the_option(make_tokenizer: Make) -> None:
    rows = [{"question": "a", "completion": "b"}]
    with pytest.raises(DataError, match=r"no column 'prompt'.*'question', 'completion'.*`prompt_column`"):
        ready(make_tokenizer(), rows)
    with pytest.raises(DataError, match=r"no column 'target'.*`completion_column`"):
        ready(make_tokenizer(), rows, prompt_column="question", completion_column="target")


def test_options_and_module_that_cannot_work(make_tokenizer: Make) -> None:
    for option in ("batch_size", "val_batch_size", "max_length"):
        with pytest.raises(ConfigurationError, match=f"{option} must be at least 1, got 0"):
            SupervisedDataModule(ROWS, **{option: 0})
    with pytest.raises(ConfigurationError, match="needs a module with a tokenizer"):
        SupervisedDataModule(ROWS).setup("fit")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match="no end-of-sequence token"):
        ready(tokenizer, ROWS)


def test_a_large_corpus_is_tokenized_in_seconds(make_tokenizer: Make) -> None:
    rows = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(30_000)]
    start = time.perf_counter()
    data = ready(make_tokenizer(), rows)
    assert len(data.train_dataloader().dataset) == 30_000
    assert time.perf_counter() - start < 30
