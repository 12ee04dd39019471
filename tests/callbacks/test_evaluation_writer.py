"""The file of an evaluation holds what the metrics were made of."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import EvaluationWriter
from lit_rlhf.data import PromptSource
from lit_rlhf.errors import OutputError
from lit_rlhf.functional import pass_at_k


class Judge:
    """Right where the completion begins with a 1, no opinion on long ones; the first character is the answer."""

    required_columns = ("answer",)

    def __call__(self, completions, completion_ids, **columns):
        pairs = zip(completions, completion_ids, strict=True)
        return [None if len(ids) > 5 else float(text.startswith("1")) for text, ids in pairs]

    def answer_key(self, completion, **columns):
        return completion[:1] or None


@pytest.fixture
def logger(tmp_path):
    return CSVLogger(tmp_path, name="csv")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def files(tmp_path):
    return sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.jsonl"))


def test_a_line_says_all_about_a_prompt_and_the_metrics_follow_from_it(
    make_trainer, make_data, policy_dir, rows, tmp_path, logger
):
    rows = [{**row, "unread": "x" * 100} for row in rows]
    data = make_data(None, val=rows, verifier=Judge(), val_samples=5, pass_k=[2], val_batch_size=4)
    (found,) = make_trainer(logger=logger).validate(GRPOModule(policy_dir), data, verbose=False)
    (name,) = files(tmp_path)
    assert name == "csv/version_0/evaluation/val-00000000.jsonl"
    lines = read(tmp_path / name)
    assert [line["prompt_index"] for line in lines] == list(range(6))
    fields = ["completion", "correct", "reward", "verifier", "tokens", "finish"]
    for row, line in zip(rows, lines, strict=True):
        assert list(line) == ["prompt_index", "prompt", "columns", "greedy", "samples"]
        assert (line["prompt"], line["columns"]) == (row["prompt"], {"answer": row["answer"]})
        assert len(line["samples"]) == 5
        for completion in (line["greedy"], *line["samples"]):
            assert [name for name in completion if name != "answer"] == fields
            assert completion["answer"] == (completion["completion"][:1] or None)
            judged = None if completion["tokens"] > 5 else float(completion["completion"].startswith("1"))
            assert completion["verifier"] == judged
            assert completion["correct"] == (judged == 1.0)
            assert completion["finish"] == "stop" or completion["tokens"] == 6
    samples = [sample for line in lines for sample in line["samples"]]
    assert any(sample["verifier"] is None for sample in samples)
    assert found["val/accuracy"] == pytest.approx(sum(line["greedy"]["correct"] for line in lines) / 6)
    assert found["val/reward"] == pytest.approx(sum(sample["reward"] for sample in samples) / 30, abs=1e-6)
    assert found["val/completion_length"] == pytest.approx(sum(sample["tokens"] for sample in samples) / 30)
    assert found["val/truncated"] == pytest.approx(sum(sample["finish"] == "length" for sample in samples) / 30)
    scores = [sample["verifier"] for sample in samples if sample["verifier"] is not None]
    assert found["val/verifier"] == pytest.approx(sum(scores) / len(scores))
    right = torch.tensor([sum(sample["correct"] for sample in line["samples"]) for line in lines])
    assert found["val/pass@2"] == pytest.approx(pass_at_k(5, right, 2).mean().item())


def test_a_run_leaves_a_file_for_each_evaluation_and_set(fit, make_data, rows, tmp_path, logger):
    data = make_data(val={"a": rows[:2], "b": rows[2:]}, val_samples=0, steps_per_pass=2)
    fit(data, max_epochs=2, logger=logger, check_val_every_n_epoch=1)
    folder = tmp_path / "csv" / "version_0" / "evaluation"
    expected = [f"val-{step:08}-{name}.jsonl" for step in (0, 2, 4) for name in ("a", "b")]
    assert sorted(file.name for file in folder.iterdir()) == expected
    lines = read(folder / "val-00000002-b.jsonl")
    assert [(line["set"], line["prompt_index"], line["samples"]) for line in lines] == [("b", n, []) for n in range(4)]


def test_a_test_of_a_checkpoint_is_named_after_its_step(
    fit, make_trainer, make_data, policy_dir, rows, tmp_path, logger
):
    checkpoint = tmp_path / "kept.ckpt"
    fit(make_data(), max_epochs=3).trainer.save_checkpoint(checkpoint)
    data = make_data(None, test=rows)
    make_trainer(logger=logger).test(GRPOModule(policy_dir), data, ckpt_path=str(checkpoint), verbose=False)
    assert files(tmp_path) == ["csv/version_0/evaluation/test-00000003.jsonl"]


def test_columns_that_are_no_json_and_abstentions(make_trainer, make_data, policy_dir, tmp_path, logger):
    def silent(completions, level, odd):
        return [None] * len(completions)

    class Odd(PromptSource):
        def __iter__(self):
            return iter([{"prompt": "1+1=", "level": 1, "odd": {"a": {1, 2}}}])

    data = make_data(None, val=Odd(), rewards=silent)
    make_trainer(logger=logger).validate(GRPOModule(policy_dir), data, verbose=False)
    (line,) = read(tmp_path / files(tmp_path)[0])
    assert line["columns"] == {"level": 1, "odd": {"a": "{1, 2}"}}
    assert line["greedy"]["reward"] is line["greedy"]["verifier"] is None


def test_without_a_logger_there_is_no_file_but_in_a_folder_of_ones_own(
    make_trainer, make_data, policy_dir, rows, tmp_path
):
    make_trainer().validate(GRPOModule(policy_dir), make_data(None, val=rows), verbose=False)
    assert files(tmp_path) == []
    writer = EvaluationWriter(str(tmp_path / "own"))
    make_trainer(callbacks=[writer]).validate(GRPOModule(policy_dir), make_data(None, val=rows), verbose=False)
    assert files(tmp_path) == ["own/val-00000000.jsonl"]


def test_it_can_be_switched_off(make_trainer, make_data, policy_dir, rows, tmp_path, logger):
    trainer = make_trainer(logger=logger, callbacks=[EvaluationWriter(enabled=False)])
    trainer.validate(GRPOModule(policy_dir), make_data(None, val=rows), verbose=False)
    assert files(tmp_path) == []


def test_a_dry_run_writes_nothing(fit, make_data, rows, tmp_path, logger):
    fit(make_data(val=rows), logger=logger, fast_dev_run=True)
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(make_trainer, make_data, policy_dir, rows, tmp_path):
    (tmp_path / "taken").write_text("a file")
    trainer = make_trainer(callbacks=[EvaluationWriter(str(tmp_path / "taken"))])
    with pytest.raises(OutputError, match="taken"):
        trainer.validate(GRPOModule(policy_dir), make_data(None, val=rows), verbose=False)


def test_a_second_evaluation_of_the_same_weights_writes_the_same_file(
    make_trainer, make_data, policy_dir, rows, tmp_path
):
    contents = []
    for number, size in enumerate((1, 6)):
        folder = tmp_path / str(number)
        data = make_data(None, val=rows, val_batch_size=size, verifier=Judge())
        trainer = make_trainer(callbacks=[EvaluationWriter(str(folder))])
        trainer.validate(GRPOModule(policy_dir), data, verbose=False)
        contents.append((folder / "val-00000000.jsonl").read_bytes())
    assert contents[0] == contents[1]
