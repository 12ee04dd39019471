from __future__ import annotations

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lit_rlhf.callbacks import RolloutCallback, SampleTable
from lit_rlhf.callbacks.sample_table import sample_rows
from lit_rlhf.errors import ConfigurationError


def test_prompts_and_completions_are_shown(fit, capsys, watch):
    fit(None, [SampleTable(every_n_iterations=1, num_rows=2)], max_epochs=1)
    shown = capsys.readouterr().out
    (rollout,) = watch.rollouts
    assert "iteration 0" in shown
    for row in (0, 4):  # the first completion of the first two prompts
        line = next(line for line in shown.splitlines() if f" {rollout.prompts[row]} " in line)
        assert rollout.completions[row] in line
        assert f"{rollout.rewards[row]:.3g}" in line
    assert f" {rollout.prompts[8]} " not in shown


def test_every_n_iterations(fit, capsys):
    fit(None, [SampleTable(every_n_iterations=3)], max_epochs=5)
    shown = capsys.readouterr().out
    assert [number for number in range(5) if f"iteration {number}" in shown] == [0, 3]


class Rewrite(RolloutCallback):
    def __init__(self, text):
        self.text = text

    def on_rewards_end(self, trainer, module, rollout):
        return rollout.replace(completions=(self.text,) * len(rollout))


def test_brackets_are_no_markup(fit, capsys):
    fit(None, [Rewrite("[/INST] [red]a"), SampleTable(every_n_iterations=1)], max_epochs=1)
    assert "[/INST] [red]a" in capsys.readouterr().out


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
    assert lines[0] == "| prompt | completion | reward | advantage | tokens | finished |"
    assert len(lines) == 2 + 4
    assert lines[2].startswith(f"| {watch.rollouts[0].prompts[0]} | a\\|b<br>c | ")


def test_cells(fit, watch):
    fit(max_epochs=1)
    rollout = watch.rollouts[0]
    unscored = rollout.replace(scored_mask=rollout.scored_mask & (rollout.group_index > 0))
    rows = sample_rows(unscored, 2)
    assert rows[0][2] == "abstained"
    advantage = float(rollout.advantages[4, 0])
    expected = (
        rollout.prompts[4],
        rollout.completions[4],
        f"{rollout.rewards[4]:.3g}",
        f"{advantage:+.2f}",
        str(int(rollout.completion_lengths[4])),
        "yes" if rollout.finished[4] else "no",
    )
    assert rows[1] == expected
    messages = tuple([{"role": "user", "content": "hello"}] for _ in range(len(rollout)))
    assert sample_rows(rollout.replace(prompts=messages), 1)[0][0] == "hello"


def test_nothing_is_changed(fit, weights):
    plain = weights(fit())
    assert weights(fit(None, [SampleTable(every_n_iterations=1)])).equal(plain)


@pytest.mark.parametrize("name", ["every_n_iterations", "num_rows"])
def test_bad_options(name):
    with pytest.raises(ConfigurationError, match=f"SampleTable: {name} must be at least 1, got 0"):
        SampleTable(**{name: 0})
