from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_rlhf.callbacks import RolloutCallback, SampleTable
from lit_rlhf.callbacks.sample_table import sample_records
from lit_rlhf.errors import ConfigurationError


def line_with(shown, *cells):
    return next(line for line in shown.splitlines() if all(f" {cell} " in line for cell in cells))


def test_the_first_completions_of_the_first_prompts_are_shown(fit, capsys, watch):
    fit(None, [SampleTable(every_n_iterations=1, num_prompts=2, per_prompt=3)], max_epochs=1)
    shown = capsys.readouterr().out
    (rollout,) = watch.rollouts
    assert "iteration 0" in shown
    table = shown[shown.index("iteration 0") :].split("└")[0]
    assert sum(line.startswith("│") for line in table.splitlines()) == 2 * 3
    for row in (0, 1, 2, 4, 5, 6):
        line = line_with(table, rollout.prompts[row], rollout.completions[row], f"{rollout.rewards[row]:.3g}")
        assert (" stop " in line) == bool(rollout.finished[row])
    assert f" {rollout.prompts[8]} " not in table


def test_every_n_iterations(fit, capsys):
    fit(None, [SampleTable(every_n_iterations=3)], max_epochs=5)
    titles = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("iteration ")]
    assert titles == ["iteration 0", "iteration 3"]


class Rewrite(RolloutCallback):
    def __init__(self, text):
        self.text = text

    def on_rewards_end(self, trainer, module, rollout):
        return rollout.replace(completions=(self.text,) * len(rollout))


def test_brackets_are_no_markup_and_line_breaks_no_rows(fit, capsys):
    fit(None, [Rewrite("[/INST] [red]\na"), SampleTable(every_n_iterations=1)], max_epochs=1)
    assert "[/INST] [red]↵a" in capsys.readouterr().out


def test_long_texts_are_cut_in_the_console(fit, capsys):
    fit(None, [Rewrite("abc" * 9), SampleTable(every_n_iterations=1, max_characters=4)], max_epochs=1)
    shown = capsys.readouterr().out
    assert "abca" in shown
    assert "abcab" not in shown


def test_text_in_tensorboard(fit, tmp_path, watch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    fit(None, [Rewrite("a|b\nc"), SampleTable(every_n_iterations=1)], max_epochs=2, logger=logger, log_every_n_steps=1)
    events = EventAccumulator(logger.log_dir).Reload()
    first, second = events.Tensors("samples/text_summary")
    assert (first.step, second.step) == (0, 1)
    lines = first.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == "| prompt | completion | reward | advantage | tokens | finish |"
    assert len(lines) == 2 + 4 * 2
    assert lines[2].startswith(f"| {watch.rollouts[0].prompts[0]} | a\\|b<br>c | ")


def some_abstain(completions, **columns):
    return [None if place % 2 else 1.0 for place, _ in enumerate(completions)]


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_every_completion_is_in_the_file(fit, make_data, digits, tmp_path, watch, file_format):
    table = SampleTable(every_n_iterations=2, num_prompts=1, file_format=file_format)
    data = make_data(rewards=[digits, some_abstain])
    fit(data, [table], max_epochs=4, logger=CSVLogger(tmp_path, name="run", version=0))
    folder = tmp_path / "run" / "version_0" / "samples"
    assert sorted(file.name for file in folder.iterdir()) == [f"iteration-0000{n}.{file_format}" for n in (0, 2)]
    if file_format == "jsonl":
        lines = (folder / "iteration-00002.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    else:
        from datasets import Dataset

        records = Dataset.from_parquet(str(folder / "iteration-00002.parquet"), cache_dir=str(tmp_path)).to_list()
    rollout = watch.rollouts[2]
    assert records == sample_records(rollout, range(len(rollout)))
    assert [record["some_abstain"] for record in records[:2]] == [1.0, None]
    assert records[1]["share_of_digits"] == pytest.approx(float(rollout.reward_components[1, 0]))


def test_no_file_without_a_logger_or_where_none_is_wanted(fit, tmp_path):
    fit(None, [SampleTable(every_n_iterations=1)], max_epochs=1)
    wanted = SampleTable(every_n_iterations=1, file_format="none")
    fit(None, [wanted], max_epochs=1, logger=CSVLogger(tmp_path))
    assert not list(tmp_path.rglob("samples"))


def test_records(fit, watch):
    fit(max_epochs=1)
    rollout = watch.rollouts[0]
    unscored = rollout.replace(scored_mask=rollout.scored_mask & (rollout.group_index > 0))
    first, fifth = sample_records(unscored, [0, 4])
    assert first["reward"] is None
    assert fifth == {
        "group": 1,
        "prompt_index": int(rollout.prompt_index[4]),
        "prompt": rollout.prompts[4],
        "completion": rollout.completions[4],
        "reward": float(rollout.rewards[4]),
        "advantage": pytest.approx(float(rollout.advantages[4, 0])),
        "tokens": int(rollout.completion_lengths[4]),
        "finish": "stop" if rollout.finished[4] else "length",
    }
    messages = tuple([{"role": "user", "content": "hello"}] for _ in range(len(rollout)))
    assert sample_records(rollout.replace(prompts=messages), [0])[0]["prompt"] == "hello"


def test_the_advantage_is_a_mean_over_tokens_that_count(fit, watch):
    fit(max_epochs=1)
    rollout = watch.rollouts[0]
    mask = torch.zeros_like(rollout.completion_mask)
    mask[0, 0] = True
    advantages = torch.full_like(rollout.advantages, 7.0)
    advantages[0, 0] = 3.0
    first, second = sample_records(rollout.replace(completion_mask=mask, advantages=advantages), [0, 1])
    assert (first["advantage"], second["advantage"]) == (3.0, 0.0)


def test_nothing_is_changed(fit, weights):
    plain = weights(fit())
    assert weights(fit(None, [SampleTable(every_n_iterations=1)])).equal(plain)


@pytest.mark.parametrize("name", ["every_n_iterations", "num_prompts", "per_prompt", "max_characters"])
def test_bad_numbers(name):
    with pytest.raises(ConfigurationError, match=f"SampleTable: {name} must be a number in \\[1, inf\\), got 0"):
        SampleTable(**{name: 0})


def test_bad_format():
    with pytest.raises(ConfigurationError, match="file_format must be one of jsonl, parquet, none, got 'csv'"):
        SampleTable(file_format="csv")
