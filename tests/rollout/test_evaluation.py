from __future__ import annotations

import csv
import itertools
import json
import math

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import CompletionWriter
from lit_rlhf.errors import ConfigurationError


@pytest.fixture
def held_out(rows):
    return [{**row, "right": right} for row, right in zip(rows, [1, 0, 1, 1, 0], strict=False)]


def by_column(completions, right):
    return [float(value) for value in right]


class Recorder:
    """A verifier that finds some completions right, and remembers all that it saw."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, completion_ids):
        correct = [len(ids) % 2 == 0 for ids in completion_ids]
        self.calls.append((list(prompts), list(completions), correct))
        return [float(value) for value in correct]


def validate(make_trainer, module, data, **options):
    (results,) = make_trainer(**options).validate(module, data, verbose=False)
    return results


@pytest.mark.parametrize("size", [None, 1, 2, 4, 5])
def test_accuracy_is_a_mean_over_prompts(make_trainer, make_data, policy_dir, held_out, size):
    """Three of five; the mean of the means of batches of four and one would be 0.375."""
    data = make_data(None, val=held_out, verifier=by_column, val_batch_size=size, val_samples=3, pass_k=[1, 2])
    results = validate(make_trainer, GRPOModule(policy_dir), data)
    for name in ("accuracy", "sampled_accuracy", "pass@1", "pass@2"):
        assert results[f"val/{name}"] == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize("size", [1, 5])
def test_other_means_do_not_depend_on_the_batch(make_trainer, make_data, policy_dir, held_out, size):
    results = validate(make_trainer, GRPOModule(policy_dir), make_data(None, val=held_out, val_batch_size=size))
    again = validate(make_trainer, GRPOModule(policy_dir), make_data(None, val=held_out, val_batch_size=3))
    assert results == pytest.approx(again, abs=1e-6)
    assert results["val/completion_length"] > 1


def test_greedy_and_sampled(make_trainer, make_data, policy_dir, held_out):
    verifier = Recorder()
    data = make_data(None, val=held_out, verifier=verifier, val_samples=6, pass_k=[1, 2, 4, 6], val_batch_size=2)
    results = validate(make_trainer, GRPOModule(policy_dir), data)
    assert [len(texts) for _, texts, _ in verifier.calls] == [2, 12, 2, 12, 1, 6]
    greedy, sampled = verifier.calls[0::2], verifier.calls[1::2]
    correct = [value for call in greedy for value in call[2]]
    assert results["val/accuracy"] == pytest.approx(sum(correct) / 5)
    assert [prompt for call in greedy for prompt in call[0]] == [row["prompt"] for row in held_out]

    samples = [value for call in sampled for value in call[2]]
    assert results["val/sampled_accuracy"] == pytest.approx(sum(samples) / 30)
    assert 0 < sum(samples) < 30
    for k in (1, 2, 4, 6):
        chances = [
            sum(any(chosen) for chosen in itertools.combinations(samples[start : start + 6], k)) / math.comb(6, k)
            for start in range(0, 30, 6)
        ]
        assert results[f"val/pass@{k}"] == pytest.approx(sum(chances) / 5)
    assert len({text for call in sampled for text in call[1]}) > len({text for call in greedy for text in call[1]})


def test_temperature_zero_samples_greedily(make_trainer, make_data, policy_dir, held_out):
    verifier = Recorder()
    validate(
        make_trainer, GRPOModule(policy_dir), make_data(None, val=held_out, verifier=verifier, val_temperature=0.0)
    )
    (_, greedy, _), (_, sampled, _) = verifier.calls
    assert sampled == [text for text in greedy for _ in range(2)]


def test_the_same_weights_give_the_same_numbers(make_trainer, make_data, policy_dir, held_out):
    first, second, other = Recorder(), Recorder(), Recorder()
    for verifier, seed in ((first, 0), (second, 0), (other, 1)):
        torch.manual_seed(len(verifier.calls))
        data = make_data(None, val=held_out, verifier=verifier, val_samples=4, seed=seed)
        validate(make_trainer, GRPOModule(policy_dir), data)
    assert first.calls == second.calls
    assert first.calls[0] == other.calls[0]  # greedy
    assert first.calls[1] != other.calls[1]


def test_each_evaluation_of_a_run_draws_the_same_random_numbers(fit, make_data, held_out):
    verifier = Recorder()
    data = make_data(val=held_out, verifier=verifier, rewards=lambda completions: [0.0] * len(completions))
    fit(data, max_epochs=3)  # nothing is learned
    assert len(verifier.calls) == 8
    assert verifier.calls[0::2] == [verifier.calls[0]] * 4
    assert verifier.calls[1::2] == [verifier.calls[1]] * 4


def test_no_samples(make_trainer, make_data, policy_dir, held_out):
    verifier = Recorder()
    results = validate(
        make_trainer, GRPOModule(policy_dir), make_data(None, val=held_out, verifier=verifier, val_samples=0)
    )
    assert len(verifier.calls) == 1
    names = ("accuracy", "accuracy_low", "accuracy_high", "completion_length", "truncated", "reward")
    assert set(results) == {f"val/{name}" for name in (*names, "verifier", "verifier_low", "verifier_high")}


def test_where_the_verifier_abstains_nothing_is_right(make_trainer, make_data, policy_dir, held_out):
    def silent(completions):
        return [None] * len(completions)

    data = make_data(None, val=held_out, verifier=silent, verifier_threshold=0.0)
    assert validate(make_trainer, GRPOModule(policy_dir), data)["val/accuracy"] == 0.0


def test_the_threshold_decides(make_trainer, make_data, policy_dir, held_out):
    def half(completions):
        return [0.5] * len(completions)

    for threshold, accuracy in ((0.5, 1.0), (0.6, 0.0)):
        data = make_data(None, val=held_out, verifier=half, verifier_threshold=threshold)
        assert validate(make_trainer, GRPOModule(policy_dir), data)["val/accuracy"] == accuracy


def test_the_time_before_training_is_step_zero(fit, make_data, held_out, tmp_path):
    logger = CSVLogger(tmp_path, name="csv")
    data = make_data(val=held_out, verifier=by_column, steps_per_pass=2)
    module = fit(data, max_epochs=2, logger=logger, log_every_n_steps=1)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        logged = [(int(row["step"]), float(row["val/accuracy"])) for row in csv.DictReader(file) if row["val/accuracy"]]
    assert [step for step, _ in logged] == [0, 2, 4]  # optimizer steps done
    assert [accuracy for _, accuracy in logged] == pytest.approx([0.6] * 3)
    assert module.initial_metrics["val/accuracy"] == pytest.approx(0.6)
    assert module.initial_metrics["val/pass@2"] == pytest.approx(0.6)


def test_the_evaluation_before_training_sees_all_prompts(fit, make_data, held_out):
    verifier = Recorder()
    fit(make_data(val=held_out, verifier=verifier, val_batch_size=1, val_samples=0), max_epochs=1)
    prompts = [prompt for call in verifier.calls for prompt in call[0]]
    assert prompts == [row["prompt"] for row in held_out] * 2


def test_it_can_be_switched_off(fit, make_data, held_out):
    module = fit(make_data(val=held_out), max_epochs=1, num_sanity_val_steps=0)
    assert module.initial_metrics == {}


def test_fit_without_held_out_prompts(fit, make_data, watch):
    assert fit(make_data()).trainer.global_step == 2
    assert not any(name.startswith("val/") for name in watch.final)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_without_fit(make_trainer, make_data, policy_dir, held_out, stage):
    module = GRPOModule(policy_dir, kl_coef=0.1)
    trainer = make_trainer()
    data = make_data(None, val=held_out, verifier=by_column)
    (results,) = getattr(trainer, stage)(module, data, verbose=False)
    prefix = {"validate": "val", "test": "test"}[stage]
    assert results[f"{prefix}/accuracy"] == pytest.approx(0.6)
    assert module.reference is None


def test_test_prompts_are_their_own(make_trainer, make_data, policy_dir, held_out):
    data = make_data(None, val=held_out, test=held_out[:2], verifier=by_column)
    (results,) = make_trainer().test(GRPOModule(policy_dir), data, verbose=False)
    assert results["test/accuracy"] == pytest.approx(0.5)


@pytest.mark.parametrize(("stage", "split"), [("validate", "val"), ("test", "test"), ("predict", "test")])
def test_a_stage_without_prompts_names_the_option(make_trainer, make_data, policy_dir, stage, split):
    module = GRPOModule(policy_dir)
    with pytest.raises(ConfigurationError, match=rf"set RolloutDataModule\({split}=...\)"):
        getattr(make_trainer(), stage)(module, make_data())
    assert module.policy is None


def test_predict_writes_every_completion(make_trainer, make_data, policy_dir, held_out, tmp_path):
    data = make_data(None, test=held_out, verifier=by_column, val_samples=3, val_batch_size=2)
    predictions = make_trainer().predict(GRPOModule(policy_dir), data)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [record for batch in predictions for record in batch]
    assert len(lines) == 5 * (1 + 3)
    fields = ["prompt_index", "prompt", "completion", "sampling", "correct", "reward", "tokens", "finish_reason"]
    assert all(list(line) == fields for line in lines)
    assert [line["sampling"] for line in lines].count("greedy") == 5
    for line in lines:
        assert line["prompt"] == held_out[line["prompt_index"]]["prompt"]
        assert line["correct"] == bool(held_out[line["prompt_index"]]["right"])
        assert line["tokens"] == 6 or line["finish_reason"] == "stop"
    assert {line["finish_reason"] for line in lines} == {"stop", "length"}


def test_predictions_go_where_they_are_asked_to(make_trainer, make_data, policy_dir, held_out, tmp_path):
    file = tmp_path / "deep" / "inside" / "out.jsonl"
    data = make_data(None, test=held_out, val_samples=0)
    make_trainer(callbacks=[CompletionWriter(str(file))]).predict(GRPOModule(policy_dir), data)
    assert len(file.read_text().splitlines()) == 5
    assert not (tmp_path / "completions.jsonl").exists()
