"""Several held-out data sets, the verifier beside the reward, the majority vote, and intervals."""

from __future__ import annotations

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import ResumeGuard
from lit_rlhf.data import PromptSource
from lit_rlhf.errors import ConfigurationError, DataError, RewardError
from lit_rlhf.rewards import ExactMatch, MathAnswer


@pytest.fixture
def sets(rows):
    marked = [{**row, "right": right} for row, right in zip(rows, [1, 0, 1, 1, 0, 1], strict=True)]
    return {"short": marked[:2], "long": marked[2:]}


def by_column(completions, right):
    return [float(value) for value in right]


def length(completions, completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def validate(make_trainer, policy_dir, data, stage="validate", **options):
    (results,) = getattr(make_trainer(**options), stage)(GRPOModule(policy_dir), data, verbose=False)
    return results


@pytest.mark.parametrize("size", [None, 1, 3])
def test_each_set_and_all_prompts_together(make_trainer, make_data, policy_dir, sets, size):
    found = validate(make_trainer, policy_dir, make_data(None, val=sets, verifier=by_column, val_batch_size=size))
    assert found["val/short/accuracy"] == 0.5
    assert found["val/long/accuracy"] == 0.75
    assert found["val/accuracy"] == pytest.approx(4 / 6)  # not the mean of the two
    assert found["val/long/pass@2"] == 0.75
    assert found["val/short/accuracy_low"] < 0.5 < found["val/short/accuracy_high"]


def test_a_set_is_what_it_is_alone(make_trainer, make_data, policy_dir, sets):
    """Its completions do not depend on which other sets there are, nor in which order."""
    both = validate(make_trainer, policy_dir, make_data(None, val=sets, val_samples=4))
    turned = dict(reversed(sets.items()))
    other = validate(make_trainer, policy_dir, make_data(None, val=turned, val_samples=4))
    alone = validate(make_trainer, policy_dir, make_data(None, val={"long": sets["long"]}, val_samples=4))
    assert alone["val/accuracy"] == alone["val/long/accuracy"]
    for name, value in both.items():
        assert other[name] == pytest.approx(value, abs=1e-6), name
        if name.startswith("val/long/"):
            assert alone[name] == pytest.approx(value, abs=1e-6), name


def test_sets_may_have_different_columns(make_trainer, make_data, policy_dir, sets):
    sets["long"] = [{**row, "level": 3} for row in sets["long"]]
    seen = []

    def look(completions, right, **columns):
        seen.append(set(columns) - {"prompts", "completion_ids"})
        return [float(value) for value in right]

    validate(make_trainer, policy_dir, make_data(None, val=sets, verifier=look, val_samples=0))
    assert seen == [{"answer"}, {"answer", "level"}]


def test_test_sets(make_trainer, make_data, policy_dir, sets):
    found = validate(make_trainer, policy_dir, make_data(None, val=sets, verifier=by_column), stage="test")
    assert found["test/long/accuracy"] == 0.75
    data = make_data(None, val=sets["long"], test={"short": sets["short"]}, verifier=by_column)
    found = validate(make_trainer, policy_dir, data, stage="test")
    assert found["test/accuracy"] == found["test/short/accuracy"] == 0.5


def test_predictions_name_their_set(make_trainer, make_data, policy_dir, sets):
    data = make_data(None, test=sets, val_samples=0, verifier=by_column)
    records = [record for batch in make_trainer().predict(GRPOModule(policy_dir), data) for record in batch]
    assert [(record["set"], record["prompt_index"]) for record in records] == [
        *[("short", place) for place in range(2)],
        *[("long", place) for place in range(4)],
    ]


class Numbers(PromptSource):
    def __iter__(self):
        return iter([{"prompt": f"{n}+1=", "right": 1} for n in range(3)])


def test_sources_of_any_kind_may_be_a_set(make_trainer, make_data, policy_dir, sets, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "right": 0}\n', encoding="utf-8")
    val = {"file": file, "source": Numbers(), "rows": sets["short"]}
    found = validate(make_trainer, policy_dir, make_data(None, val=val, verifier=by_column))
    assert found["val/accuracy"] == pytest.approx(4 / 6)
    assert (found["val/file/accuracy"], found["val/source/accuracy"]) == (0.0, 1.0)


def test_splits_of_a_hugging_face_dataset_are_no_sets(make_trainer, make_data, policy_dir, sets):
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in sets.items()})
    data = make_data(None, val=splits, val_split="long", verifier=by_column)
    assert validate(make_trainer, policy_dir, data)["val/accuracy"] == 0.75


@pytest.mark.parametrize(
    ("val", "message"),
    [
        ({}, "names no data set"),
        ({"a b": [{"prompt": "1"}]}, "'a b' of a data set"),
        ({"a/b": [{"prompt": "1"}]}, "'a/b' of a data set"),
        ({"sums": None}, "'sums' has no source"),
        ({"prompt": ["1+1="], "answer": ["2"]}, "a mapping names data sets"),
        ({"class_path": "no.such.Source"}, "no.such.Source is no class"),
    ],
)
def test_a_mapping_that_names_no_sets_is_refused_at_once(make_data, val, message):
    with pytest.raises(ConfigurationError, match=f"val: .*{message}"):
        make_data(val=val)


def test_what_is_wrong_with_a_set_is_said_with_its_name_before_a_model_is_loaded(
    make_trainer, make_data, policy_dir, sets, tmp_path
):
    cases = [
        ({**sets, "gone": tmp_path / "none.jsonl"}, {}, DataError, r"val/gone: .*none.jsonl: no such file"),
        ({**sets, "bare": [{"prompt": "1+1="}]}, {"verifier": by_column}, RewardError, r"val/bare: .*takes .right."),
        ({**sets, "deep": [{"prompt": "1" * 80}]}, {}, ConfigurationError, "val/deep: .*model's context"),
    ]
    for val, options, kind, message in cases:
        module = GRPOModule(policy_dir)
        with pytest.raises(kind, match=message):
            make_trainer().validate(module, make_data(None, val=val, **options), verbose=False)
        assert module.policy is None


def test_a_run_logs_all_sets_at_the_optimizer_step(fit, make_data, sets, tmp_path):
    logger = CSVLogger(tmp_path, name="csv")
    data = make_data(val=sets, verifier=by_column, steps_per_pass=2)
    module = fit(data, max_epochs=2, logger=logger, log_every_n_steps=1)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/long/accuracy")]
    assert [int(row["step"]) for row in rows] == [0, 2, 4]
    assert all(float(row["val/accuracy"]) == pytest.approx(4 / 6) for row in rows)
    assert module.initial_metrics["val/short/accuracy"] == 0.5
    assert module.last_evaluation["metrics"]["val/long/accuracy"] == 0.75


# The verifier


def test_reward_and_verifier_are_both_logged(make_trainer, make_data, policy_dir, rows):
    """The reward pays for length, the verifier for something else: both scores are of the same completions."""
    calls = []

    def short(completions, completion_ids):
        calls.append(len(completions))
        return [1.0 / len(ids) for ids in completion_ids]

    data = make_data(None, rewards=length, val=rows, verifier=short, val_samples=3)
    found = validate(make_trainer, policy_dir, data)
    assert found["val/reward"] == pytest.approx(found["val/completion_length"], abs=1e-5)
    assert 1 / found["val/reward"] <= found["val/verifier"] <= 1
    assert found["val/verifier_low"] <= found["val/verifier"] <= found["val/verifier_high"]
    assert calls == [6, 18]


def test_without_a_verifier_of_its_own_there_is_no_score_of_it(make_trainer, make_data, policy_dir, rows):
    found = validate(make_trainer, policy_dir, make_data(None, rewards=length, val=rows))
    assert not [name for name in found if "verifier" in name]


def test_a_verifier_that_is_one_of_the_rewards_is_asked_once(make_trainer, make_data, policy_dir, sets):
    calls = []

    def judge(completions, right):
        calls.append(len(completions))
        return [float(value) for value in right]

    data = make_data(None, rewards=[length, judge], val=sets["long"], verifier=judge, val_samples=2)
    found = validate(make_trainer, policy_dir, data)
    assert calls == [4, 8]
    assert found["val/accuracy"] == found["val/verifier"] == 0.75


def test_abstentions_are_in_no_mean(make_trainer, make_data, policy_dir, rows):
    def sometimes(completions, completion_ids):
        return [2.0 if len(ids) == 6 else None for ids in completion_ids]

    found = validate(make_trainer, policy_dir, make_data(None, val=rows, verifier=sometimes, val_samples=4))
    assert found["val/verifier"] == 2.0
    assert found["val/sampled_accuracy"] < 1
    assert "val/verifier_low" not in found  # all scores are the same, and nobody knows what others there are


# The majority vote


class Vote:
    """Finds completions right that begin with a 1; the first character is the answer."""

    def __call__(self, completions):
        return [float(text.startswith("1")) for text in completions]

    def answer_key(self, completion, **columns):
        assert columns
        return completion[:1] or None


def test_the_most_frequent_answer_counts(make_trainer, make_data, policy_dir, rows, tmp_path):
    data = make_data(None, val=rows, verifier=Vote(), val_samples=5)
    found = validate(make_trainer, policy_dir, data)
    records = make_trainer().predict(GRPOModule(policy_dir), make_data(None, val=rows, verifier=Vote(), val_samples=5))
    expected = []
    for place in range(len(rows)):
        texts = [
            record["completion"]
            for batch in records
            for record in batch
            if record["prompt_index"] == place and record["sampling"] == "sampled"
        ]
        firsts = [text[0] for text in texts if text]
        tied = [first for first in set(firsts) if firsts.count(first) == max(map(firsts.count, firsts))]
        expected.append(("1" in tied) / len(tied))
    assert found["val/maj@5"] == pytest.approx(sum(expected) / len(expected))
    assert 0 < found["val/maj@5"] < 1
    assert found["val/maj@5_low"] <= found["val/maj@5"] <= found["val/maj@5_high"]


@pytest.mark.parametrize(("verifier", "samples"), [(by_column, 4), (Vote(), 1), (Vote(), 0)])
def test_no_vote_without_answers_or_without_samples(make_trainer, make_data, policy_dir, sets, verifier, samples):
    data = make_data(None, val=sets["long"], verifier=verifier, val_samples=samples)
    assert not [name for name in validate(make_trainer, policy_dir, data) if "maj@" in name]


def test_answers_are_counted_by_value():
    same = ["It is 18.00", r"\boxed{18}", "36/2 = 18", "<think>9</think>#### 18", "18 apples"]
    assert {MathAnswer().answer_key(text) for text in same} == {"18"}
    assert MathAnswer().answer_key([{"role": "assistant", "content": "#### 1,800"}]) == "1800"
    assert MathAnswer().answer_key("<think>never closed 18") is None
    assert {MathAnswer().answer_key(text) for text in (r"\boxed{x + 1}", r"\boxed{x+1}")} == {"x+1"}
    assert ExactMatch().answer_key(" Paris\n") == ExactMatch().answer_key("paris")


# Intervals


def test_intervals_are_of_the_main_metrics_alone(make_trainer, make_data, policy_dir, rows):
    found = validate(make_trainer, policy_dir, make_data(None, val=rows, verifier=Vote(), val_samples=4, pass_k=[1, 4]))
    with_interval = {name.removesuffix("_low") for name in found if name.endswith("_low")}
    main = {"accuracy", "sampled_accuracy", "pass@1", "pass@4", "maj@4", "verifier"}
    assert with_interval == {f"val/{name}" for name in main}
    for name in with_interval:
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]


def test_less_confidence_narrower_intervals_or_none(make_trainer, make_data, policy_dir, rows):
    widths = []
    for confidence in (0.5, 0.95):
        found = validate(
            make_trainer, policy_dir, make_data(None, val=rows, val_confidence=confidence, verifier=Vote())
        )
        widths.append(found["val/sampled_accuracy_high"] - found["val/sampled_accuracy_low"])
    assert widths[0] < widths[1]
    found = validate(make_trainer, policy_dir, make_data(None, val=rows, val_confidence=None))
    assert not [name for name in found if name.endswith(("_low", "_high"))]


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95])
def test_a_confidence_is_a_chance(make_data, confidence):
    with pytest.raises(ConfigurationError, match="val_confidence"):
        make_data(val_confidence=confidence)


def test_evaluation_changes_no_weight_and_no_random_number(fit, make_data, sets, weights):
    alone = fit(make_data())
    evaluated = fit(make_data(val=sets, verifier=Vote(), val_samples=3), check_val_every_n_epoch=1)
    assert torch.equal(weights(alone), weights(evaluated))


def test_other_held_out_prompts_are_no_other_run(fit, make_data, sets, tmp_path):
    """What is evaluated may change on resume: it decides nothing of what is learned."""
    checkpoint = tmp_path / "kept.ckpt"
    fit(make_data(val=sets), max_epochs=1).trainer.save_checkpoint(checkpoint)
    options = {"val": sets["long"], "val_confidence": None, "verifier": by_column}
    module = fit(make_data(**options), callbacks=[ResumeGuard()], max_epochs=2, ckpt_path=str(checkpoint))
    assert module.trainer.global_step == 2


def test_an_evaluated_checkpoint_stands_at_its_step(fit, make_data, make_trainer, policy_dir, sets, tmp_path):
    checkpoint = tmp_path / "kept.ckpt"
    fit(make_data(val=sets), max_epochs=3).trainer.save_checkpoint(checkpoint)
    logger = CSVLogger(tmp_path, name="csv")
    trainer = make_trainer(logger=logger)
    trainer.validate(GRPOModule(policy_dir), make_data(None, val=sets), ckpt_path=str(checkpoint), verbose=False)
    logger.save()
    with open(f"{logger.log_dir}/metrics.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [3]
