from __future__ import annotations

import gzip
import json
import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_rlhf.data.dialogues import encode_dialogues, join_dialogue
from lit_rlhf.data.preferences import PreferenceDataModule
from lit_rlhf.errors import ConfigurationError, DataError

Make = Callable[..., Any]
RLHF = Path(__file__).parents[2] / "recipes" / "quickstart" / "rlhf"
ROWS = [
    {"prompt": "The sky at night is", "chosen": " dark.", "rejected": " a potato."},
    {"prompt": "2+2=", "chosen": "4", "rejected": ""},
]
HH = [
    {
        "chosen": "\n\nHuman: How do I boil an egg?\n\nAssistant: Eight minutes in water.",
        "rejected": "\n\nHuman: How do I boil an egg?\n\nAssistant: Eggs are round.",
    },
    {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Joke\n\nAssistant: Why did the duck cross?",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Joke\n\nAssistant: No.",
    },
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ready(tokenizer: Any, train: Any, stage: str = "fit", **options: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(train, **options)
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(tokenizer=tokenizer))
    data.setup(stage)
    return data


def texts(tokenizer: Any, data: PreferenceDataModule) -> list[tuple[str, str]]:
    return [(tokenizer.decode(p.chosen_ids), tokenizer.decode(p.rejected_ids)) for p in data.pairs["train"].pairs]


@pytest.mark.parametrize("pad", ["<pad>", "</s>", None])
def test_masks_come_from_lengths_whatever_the_padding_id(make_tokenizer: Make, pad: str | None) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True, pad=pad)
    batch = next(iter(ready(tokenizer, ROWS, val=ROWS).val_dataloader()))
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
        ("chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"), (2, 31)
    )
    for side in ("chosen", "rejected"):
        ids, mask = batch[f"{side}_ids"], batch[f"{side}_mask"]
        assert mask.dtype == torch.bool
        for row, source in enumerate(ROWS):
            text = source["prompt"] + source[side]
            assert int(mask[row].sum()) == len(text) + 2
            assert mask[row, : len(text) + 2].all()
            assert tokenizer.decode(ids[row][mask[row]]) == f"<s>{text}</s>"
    assert len(tokenizer) == len(make_tokenizer(pad=pad))


def test_the_end_of_sequence_token_is_added_once_or_not_at_all(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    assert texts(tokenizer, ready(tokenizer, ROWS[1:])) == [("2+2=4</s>", "2+2=</s>")]
    assert texts(tokenizer, ready(tokenizer, ROWS[1:], append_eos=False)) == [("2+2=4", "2+2=")]
    (ids,) = encode_dialogues(make_tokenizer(eos=True), ["4"])
    assert ids[1:] == [tokenizer.eos_token_id]
    (ids,) = encode_dialogues(make_tokenizer(bos=True), ["<s>4"])
    assert tokenizer.decode(ids) == "<s>4</s>"


def test_messages_are_rendered_with_one_beginning_token(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos=True)
    chosen, rejected = "<s><user>2+2?<end><assistant>4<end>", "<s><user>2+2?<end><assistant>5<end>"
    for prompt in ("2+2?", [user("2+2?")]):
        rows = [{"prompt": prompt, "chosen": [answer("4")], "rejected": [answer("5")]}]
        assert texts(tokenizer, ready(tokenizer, rows)) == [(chosen, rejected)]
    rows = [{"prompt": [user("2+2?")], "chosen": "4", "rejected": "5"}]
    assert texts(tokenizer, ready(tokenizer, rows)) == [(chosen, rejected)]


def test_ultrafeedback_in_parquet_has_the_users_turn_once(make_tokenizer: Make, tmp_path: Path) -> None:
    import datasets

    row = {
        "prompt": "Name two fruits.",
        "prompt_id": "a1",
        "chosen": [user("Name two fruits."), answer("Apple and pear.")],
        "rejected": [user("Name two fruits."), answer("Fruit.")],
        "score_chosen": 8.5,
        "score_rejected": 8.5,
    }
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "train.parquet")
    tokenizer = make_tokenizer()
    expected = [
        (
            "<s><user>Name two fruits.<end><assistant>Apple and pear.<end>",
            "<s><user>Name two fruits.<end><assistant>Fruit.<end>",
        )
    ]
    assert texts(tokenizer, ready(tokenizer, str(tmp_path / "train.parquet"))) == expected
    implicit = [{name: row[name] for name in ("chosen", "rejected")}]
    assert texts(tokenizer, ready(tokenizer, implicit)) == expected

    splits = datasets.DatasetDict(
        train_prefs=datasets.Dataset.from_list([row]), test_prefs=datasets.Dataset.from_list([row])
    )
    splits.save_to_disk(tmp_path / "both")
    data = ready(tokenizer, str(tmp_path / "both"), train_split="train_prefs")
    assert texts(tokenizer, data) == expected


def test_hh_dialogues_in_jsonl_gz_are_read_whole(make_tokenizer: Make, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in HH)
    tokenizer = make_tokenizer()
    expected = [(row["chosen"] + "</s>", row["rejected"] + "</s>") for row in HH]
    assert texts(tokenizer, ready(tokenizer, str(path))) == expected
    # Published again with the prompt beside them, as whole dialogues or as answers.
    cut = [row["chosen"].rindex("Assistant:") + len("Assistant:") for row in HH]
    whole = [{"prompt": row["chosen"][:end], **row} for row, end in zip(HH, cut, strict=True)]
    assert texts(tokenizer, ready(tokenizer, whole)) == expected
    answers = [
        {key: value if key == "prompt" else value[end:] for key, value in row.items()}
        for row, end in zip(whole, cut, strict=True)
    ]
    assert texts(tokenizer, ready(tokenizer, answers)) == expected


def test_pairs_that_teach_nothing_are_dropped_and_counted_or_refused(
    make_tokenizer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        data = ready(make_tokenizer(), [ROWS[0], same, ROWS[1], same])
    assert [pair.index for pair in data.pairs["train"].pairs] == [0, 2]
    assert caplog.messages == [
        "iterable: 2 of 4 pairs dropped, the first: iterable, row 2: chosen and rejected are the same"
    ]
    with pytest.raises(DataError, match=r"iterable, row 2: chosen and rejected are the same \(1 of 2 rows"):
        ready(make_tokenizer(), [ROWS[0], same], unusable="error")
    with pytest.raises(DataError, match=r"row 1: chosen and rejected are the same \(1 of 1 rows"):
        ready(make_tokenizer(), [same])


def test_a_prompt_column_with_another_name_is_not_lost_in_silence(make_tokenizer: Make) -> None:
    rows = [{"question": "2+2?", "chosen": "4", "rejected": "5"}]
    message = r"row 1: there is no column 'prompt'.*`prompt_column`, there are question, chosen, rejected"
    with pytest.raises(DataError, match=message):
        ready(make_tokenizer(), rows)
    tokenizer = make_tokenizer()
    assert texts(tokenizer, ready(tokenizer, rows, prompt_column="question")) == [("2+2?4</s>", "2+2?5</s>")]
    data = ready(tokenizer, [{"chosen": "The sky is blue", "rejected": "The sky is 5"}], prompt_column=None)
    assert texts(tokenizer, data) == [("The sky is blue</s>", "The sky is 5</s>")]
    with pytest.raises(DataError, match="there is no column 'prompt'"):
        ready(tokenizer, [{"question": "2+2?", "chosen": "It is 4", "rejected": "It is 5"}])
    other = {"chosen": HH[0]["chosen"], "rejected": HH[1]["rejected"]}
    with pytest.raises(DataError, match="no dialogues with the same beginning"):
        ready(make_tokenizer(), [other])
    with pytest.raises(DataError, match="no dialogues with the same beginning"):
        ready(make_tokenizer(), [{"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("b")]}])


def test_pairs_over_the_limit_are_left_out(make_tokenizer: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        data = ready(make_tokenizer(), ROWS, max_length=6)
    assert [pair.index for pair in data.pairs["train"].pairs] == [1]
    assert caplog.messages == ["iterable: 1 of 2 pairs longer than 6 tokens dropped, longest 30 (iterable, row 1)"]
    with pytest.raises(DataError, match="2 of 2 pairs longer than 5 tokens, none is left"):
        ready(make_tokenizer(), ROWS, max_length=5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "train.jsonl, line 2, column 'prompt': the prompt is ''"),
        ({"chosen": "a", "rejected": "b"}, "train.jsonl, line 2, column 'prompt': the prompt is None"),
        ({"prompt": "a", "chosen": "b"}, "train.jsonl, line 2, column 'rejected': the answer is None"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "line 2, column 'chosen': the answer is \\[\\]"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, "line 2, column 'rejected': the answer has 'c'"),
        ({"prompt": "a", "chosen": "b", "rejected": [user("c")]}, "line 2, column 'rejected': the last message is"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "line 2, column 'chosen': the prompt is 3"),
        ({"prompt": "a\ud83d", "chosen": "b", "rejected": "c"}, "train.jsonl, line 2: the tokenizer cannot read"),
        (
            {"prompt": "a", "chosen": [{"role": "user", "content": "a"}, answer("b")], "rejected": [answer("c")]},
            "train.jsonl, line 2: .*no chat template",
        ),
    ],
)
def test_unusable_rows_are_named(make_tokenizer: Make, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (ROWS[0], row)))
    with pytest.raises(DataError, match=message):
        ready(make_tokenizer(template=None), str(path))


def test_a_rejecting_template_and_missing_columns_are_named(make_tokenizer: Make) -> None:
    template = "{% for m in messages %}{{ raise_exception('no ' + m['role']) }}{% endfor %}"
    rows = [{"prompt": [user("a")], "chosen": "b", "rejected": "c"}]
    with pytest.raises(DataError, match="row 1: the chat template rejects messages with the roles 'user', 'assistant'"):
        ready(make_tokenizer(template=template), rows)
    with pytest.raises(DataError, match=r"no column 'better'.*'chosen'.*`chosen_column`"):
        ready(make_tokenizer(), rows, chosen_column="better")
    with pytest.raises(DataError, match=r"no column 'worse'.*`rejected_column`"):
        ready(make_tokenizer(), rows, rejected_column="worse")


def test_options_and_module_that_cannot_work(make_tokenizer: Make) -> None:
    for option in ("batch_size", "val_batch_size", "max_length"):
        with pytest.raises(ConfigurationError, match=f"{option} must be at least 1, got 0"):
            PreferenceDataModule(ROWS, **{option: 0})
    with pytest.raises(ConfigurationError, match="unusable='keep' is not possible"):
        PreferenceDataModule(ROWS, unusable="keep")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs a module with a tokenizer"):
        PreferenceDataModule(ROWS).setup("fit")
    with pytest.raises(ConfigurationError, match="validate needs pairs, give them in `val`"):
        ready(make_tokenizer(), ROWS, stage="validate")


def test_order_is_shuffled_by_the_seed_and_only_what_the_stage_needs_is_read(make_tokenizer: Make) -> None:
    rows = [{"prompt": "a", "chosen": str(number), "rejected": "x"} for number in range(30)]

    def order(seed: int) -> list[Any]:
        loader = ready(make_tokenizer(), rows, seed=seed, batch_size=30).train_dataloader()
        return [next(iter(loader))["chosen_ids"].tolist() for _ in range(2)]

    first, second = order(0), order(1)
    assert first == order(0)
    assert first[0] != first[1]
    assert first[0] != second[0]
    assert sorted(first[0]) == sorted(second[0])
    data = ready(make_tokenizer(), "does/not/exist.jsonl", stage="validate", val=rows, val_batch_size=7)
    assert [len(batch["chosen_ids"]) for batch in data.val_dataloader()] == [7, 7, 7, 7, 2]
    assert ready(make_tokenizer(), rows).val_dataloader() == []


def test_joining_keeps_a_dialogue_that_is_whole_and_adds_what_is_missing() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert join_dialogue(None, "whole") == "whole"
    assert join_dialogue([system, user("a")], "b") == [system, user("a"), answer("b")]
    assert join_dialogue([system, user("a")], [answer("b")]) == [system, user("a"), answer("b")]
    assert join_dialogue([user("a")], [system, user("a"), answer("b")]) == [system, user("a"), answer("b")]
    assert join_dialogue("a", [{**answer("b"), "tool_calls": None}]) == [user("a"), answer("b")]
    with pytest.raises(DataError, match="the text is empty"):
        join_dialogue(None, "")
    with pytest.raises(DataError, match="there is no prompt"):
        join_dialogue(None, [answer("b")])


def test_the_recipes_pairs_are_what_the_script_writes_and_hold_nothing_out_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_preferences.py", "--folder", str(tmp_path)])
    runpy.run_path(str(RLHF / "make_preferences.py"), run_name="__main__")
    shipped = RLHF / "data" / "preferences_val.jsonl"
    assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes()
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        for name in ("preferences", "preferences_val")
    }

    def sums(part: list[dict[str, str]]) -> set[frozenset[int]]:
        return {frozenset(map(int, row["prompt"].rstrip("=").split("+"))) for row in part}

    held_out = set()
    for name in ("val", "test"):
        held_out |= sums([json.loads(line) for line in (RLHF.parent / "data" / f"{name}.jsonl").open()])
    assert (len(rows["preferences"]), len(rows["preferences_val"])) == (25407, 768)
    assert not sums(rows["preferences"]) & held_out
    assert sums(rows["preferences_val"]) < held_out
    for row in rows["preferences"] + rows["preferences_val"]:
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["chosen"] == str(a + b)
        assert row["rejected"] not in ("", row["chosen"])
