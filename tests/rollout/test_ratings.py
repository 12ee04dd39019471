"""People's ratings are joined with the completions they were given for; what does not match is said."""

from __future__ import annotations

import csv
import json
import logging

import pytest

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import EvaluationWriter
from lit_rlhf.errors import ConfigurationError, DataError


def judge(completions, completion_ids):
    return [len(ids) / 6 for ids in completion_ids]


def options(**more):
    return {"verifier": judge, "val_samples": 3, **more}


@pytest.fixture
def evaluated(make_trainer, make_data, policy_dir, rows, tmp_path):
    """The lines of an evaluation file, and the file."""
    writer = EvaluationWriter(str(tmp_path / "first"))
    make_trainer(callbacks=[writer]).validate(GRPOModule(policy_dir), make_data(None, val=rows, **options()))
    file = tmp_path / "first" / "val-00000000.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def join(make_trainer, make_data, policy_dir, rows):
    """Metrics of another evaluation of the same policy, with ratings."""

    def run(ratings, val=rows, stage="validate", **more):
        data = make_data(None, val=val, val_ratings=ratings, **options(**more))
        (found,) = getattr(make_trainer(), stage)(GRPOModule(policy_dir), data, verbose=False)
        return {name: value for name, value in found.items() if "human" in name}

    return run


def greedy_ratings(lines, key="prompt_index"):
    return [
        {key: line[key], "completion": line["greedy"]["completion"], "rating": number}
        for number, line in enumerate(lines)
    ]


@pytest.mark.parametrize("key", ["prompt_index", "prompt"])
def test_a_rating_finds_its_completion(evaluated, join, key):
    found = join(greedy_ratings(evaluated, key))
    assert found["val/human_rated"] == 6
    assert found["val/human_unmatched"] == 0
    assert found["val/human_rating"] == 2.5


def test_agreement_is_with_the_verifier(evaluated, join):
    seen = {}
    for line in evaluated:
        for completion in (line["greedy"], *line["samples"]):
            seen[line["prompt_index"], completion["completion"]] = completion["verifier"]
    agreeing = [{"prompt_index": i, "completion": text, "rating": score} for (i, text), score in seen.items()]
    assert len(set(seen.values())) > 1
    assert join(agreeing)["val/human_agreement"] == pytest.approx(1.0, abs=1e-4)
    contrary = [{**row, "rating": -row["rating"]} for row in agreeing]
    assert join(contrary)["val/human_agreement"] == pytest.approx(-1.0, abs=1e-4)
    assert join(contrary)["val/human_rated"] == len(seen)


def test_an_evaluation_file_with_ratings_written_into_it(evaluated, join, tmp_path):
    evaluated[0]["greedy"]["rating"] = 5
    evaluated[3]["samples"][1]["rating"] = 2
    file = tmp_path / "rated.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in evaluated), encoding="utf-8")
    found = join(str(file))
    assert (found["val/human_rated"], found["val/human_rating"]) == (2, 3.5)


def test_a_spreadsheet(evaluated, join, tmp_path, caplog):
    """Where every value is text, and some rows are not rated yet."""
    file = tmp_path / "rated.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["prompt_index", "completion", "rating"])
        writer.writeheader()
        rows = greedy_ratings(evaluated)
        writer.writerows([*rows[:4], *({**row, "rating": ""} for row in rows[4:])])
    with caplog.at_level(logging.WARNING):
        found = join(str(file))
    assert (found["val/human_rated"], found["val/human_rating"]) == (4, 1.5)
    assert f"{file}: 2 have no rating yet" in caplog.text


def test_several_raters_of_one_completion(evaluated, join):
    row = greedy_ratings(evaluated)[0]
    found = join([{**row, "rating": rating} for rating in (1, 2, 6)])
    assert (found["val/human_rated"], found["val/human_rating"], found["val/human_unmatched"]) == (1, 3.0, 0)


def test_what_does_not_match_is_counted_and_said(evaluated, join, caplog):
    ratings = greedy_ratings(evaluated)
    ratings[1]["completion"] = "never sampled"
    ratings[2]["prompt_index"] = 77
    with caplog.at_level(logging.WARNING):
        found = join(ratings)
    assert (found["val/human_rated"], found["val/human_unmatched"]) == (4, 2)
    assert "1 of 6 ratings are of prompts that are not held out here" in caplog.text


def test_ratings_of_one_set_among_several(evaluated, join, rows):
    sets = {"a": rows[:3], "b": rows[3:]}
    ratings = greedy_ratings(evaluated, "prompt")
    with pytest.raises(DataError, match="val_ratings: iterable, row 1: column `set` must name one of a, b, got None"):
        join(ratings, val=sets)
    named = [{**row, "set": "a" if place < 3 else "b"} for place, row in enumerate(ratings)]
    assert join(named, val=sets)["val/human_rated"] == 6
    assert join(ratings[:3], val={"a": rows[:3]})["val/human_rated"] == 3


def test_test_prompts_that_are_those_of_val_are_rated_others_are_not(evaluated, join, rows):
    assert join(greedy_ratings(evaluated), stage="test")["test/human_rated"] == 6
    assert join(greedy_ratings(evaluated), stage="test", test=rows[:2]) == {}


def test_a_run_says_how_the_ratings_fare(fit, make_data, rows, evaluated, watch):
    """As the policy moves away from what was rated, fewer ratings find their completion."""
    data = make_data(val=rows, val_ratings=greedy_ratings(evaluated), **options())
    module = fit(data, max_epochs=4, module={"lr": 3e-2}, check_val_every_n_epoch=4)
    assert module.initial_metrics["val/human_unmatched"] == 0
    assert watch.final["val/human_unmatched"] == 6 - watch.final["val/human_rated"] > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_index": 0, "rating": 1}, "needs the completion"),
        ({"completion": "1", "rating": 1}, "needs `prompt` or `prompt_index`"),
        ({"prompt_index": 0, "completion": "1", "rating": "good"}, "a rating is a number, got 'good'"),
        ({"prompt_index": 0, "completion": "1", "rating": float("inf")}, "a rating is a number"),
        ({"prompt_index": "first", "completion": "1", "rating": 1}, "prompt_index is a whole number, got 'first'"),
        ({"prompt_index": 0, "completion": "1"}, "no row has a number in the column `rating`"),
    ],
)
def test_bad_rows_are_named_before_a_model_is_loaded(make_trainer, make_data, policy_dir, rows, row, message):
    module = GRPOModule(policy_dir)
    with pytest.raises(DataError, match=f"val_ratings: .*{message}"):
        make_trainer().validate(module, make_data(None, val=rows, val_ratings=[row]))
    assert module.policy is None


def test_ratings_need_prompts(make_data):
    with pytest.raises(ConfigurationError, match="val_ratings are ratings of completions of val"):
        make_data(val_ratings=[{"rating": 1}])
