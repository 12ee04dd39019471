from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.callbacks import SampleTable
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.report import read_run
from lit_rlhf.report.runs import read_json_lines
from tests.report.folders import alarm, run_rows, write_config, write_lines, write_metrics, write_run


@pytest.mark.parametrize("kind", [GRPOModule, PPOModule])
def test_a_real_run_is_read_as_it_was_logged(
    kind: type, make_trainer, make_data, rows, policy_dir, tmp_path: Path
) -> None:
    loggers = [TensorBoardLogger(tmp_path, "tensorboard"), CSVLogger(tmp_path, "csv", flush_logs_every_n_steps=1)]
    module = kind(policy_dir, lr=1e-3)
    trainer = make_trainer(
        max_epochs=3, logger=loggers, log_every_n_steps=1, callbacks=[SampleTable(every_n_iterations=2)]
    )
    trainer.fit(module, make_data(val=rows))
    run = read_run(tmp_path)
    steps = trainer.global_step // 3
    assert run.iteration_steps == (steps, 2 * steps, 3 * steps)
    assert run.series["val/accuracy"].steps[0] == 0
    assert run.last("reward") == pytest.approx(float(trainer.callback_metrics["reward"]))
    assert run.tokens_at(trainer.global_step) == float(trainer.callback_metrics["tokens/generated"])
    assert run.tokens_at(0) == run.seconds_at(0) == 0
    assert run.seconds_at(3 * steps) == pytest.approx(sum(run.series["time/iteration"].values))
    assert list(run.samples) == [0, 2]
    assert [(file.stage, file.step) for file in run.evaluations] == [("val", steps * count) for count in range(4)]
    last = list(read_json_lines(run.evaluations[-1].file))
    assert run.last("val/accuracy") == pytest.approx(sum(line["greedy"]["correct"] for line in last) / len(rows))
    assert run.has_critic == (kind is PPOModule)
    assert run.algorithm == kind.__name__.removesuffix("Module")


def test_what_stands_between_two_iterations_counts_with_the_earlier(tmp_path: Path) -> None:
    rows = [{"step": step, "tokens/generated": 10.0 * step, "time/iteration": 2.0} for step in (4, 8)]
    write_metrics(tmp_path, rows)
    run = read_run(tmp_path)
    assert [run.tokens_at(step) for step in (0, 3, 4, 7, 8, 9)] == [0, 0, 40, 40, 80, 80]
    assert [run.seconds_at(step) for step in (3, 4, 8)] == [0, 2, 4]


def test_a_later_start_wins_where_both_have_a_step(tmp_path: Path) -> None:
    for version, (steps, reward) in enumerate([((1, 2, 3), 0.1), ((3, 4), 0.2)]):
        rows = [{"step": step, "reward": reward, "tokens/generated": 10.0 * step} for step in steps]
        write_metrics(tmp_path / f"version_{version}", rows)
        write_lines(tmp_path / f"version_{version}" / "health.jsonl", [alarm("early", 0), alarm("late", 2)])
        write_lines(tmp_path / f"version_{version}" / "samples" / "iteration-00002.jsonl", [{"version": version}])
        write_lines(tmp_path / f"version_{version}" / "evaluation" / "val-00000003.jsonl", [{"version": version}])
    run = read_run(tmp_path)
    assert run.series["reward"].values == (0.1, 0.1, 0.2, 0.2)
    assert run.series["reward"].file.parent.name == "version_1"
    assert [(found.rule, found.iteration) for found in run.alarms] == [("early", 0), ("late", 2)]
    assert list(read_json_lines(run.samples[2][0])) == [{"version": 1}]
    assert [list(read_json_lines(found.file)) for found in run.evaluations] == [[{"version": 1}]]


def test_alarms_of_a_run_that_was_begun_anew_are_gone(tmp_path: Path) -> None:
    for version in (0, 1):
        write_metrics(tmp_path / f"version_{version}", run_rows(iterations=6))
        write_lines(tmp_path / f"version_{version}" / "health.jsonl", [alarm(f"of_{version}", 4)])
    assert [found.rule for found in read_run(tmp_path).alarms] == ["of_1"]


def test_half_a_line_of_json_is_passed_over(tmp_path: Path) -> None:
    write_run(tmp_path, alarms=[alarm("whole", 1)])
    file = next(tmp_path.rglob("health.jsonl"))
    file.write_text(file.read_text() + '{"event": "alarm", "rule": "ha')
    assert [found.rule for found in read_run(tmp_path).alarms] == ["whole"]


def test_the_recipe_is_known_where_it_was_saved(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", seed=7, group_size=4))
    assert (run.seed, run.group_size, run.algorithm) == (7, 4, "GRPO")
    assert run.option("data.init_args.prompts_per_iteration") == 16
    assert run.option("data.init_args.nothing.at.all") is None


def test_without_a_recipe_the_metrics_say_which_algorithm_it_was(tmp_path: Path) -> None:
    write_metrics(tmp_path / "ppo", run_rows(critic=True))
    write_metrics(tmp_path / "grpo", run_rows())
    assert read_run(tmp_path / "ppo").algorithm == "PPO"
    assert read_run(tmp_path / "grpo").algorithm == "GRPO"
    (tmp_path / "grpo" / "config.yaml").write_text("model: [not: closed")
    assert read_run(tmp_path / "grpo").config == {}
    write_config(tmp_path / "grpo")
    assert read_run(tmp_path / "grpo").group_size == 8


def test_a_folder_that_is_no_run_is_said_so_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"no run has logged here.*metrics\.csv"):
        read_run(tmp_path)
    (tmp_path / "metrics.csv").write_text("")
    with pytest.raises(ConfigurationError, match="no run has logged here"):
        read_run(tmp_path)
    with pytest.raises(ConfigurationError, match="this is a file"):
        read_run(tmp_path / "metrics.csv")
