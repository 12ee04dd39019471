from __future__ import annotations

import pytest
import yaml

from lit_rlhf.compare import arm_recipes
from lit_rlhf.errors import ConfigurationError

SHARED = {
    "model": {"init_args": {"policy": "base", "lr": 1.0e-3}},
    "data": {"class_path": "RolloutDataModule", "init_args": {"train": "t.jsonl", "group_size": 8, "temperature": 1.0}},
    "trainer": {"accelerator": "cpu", "callbacks": [{"class_path": "AdaptiveKL"}]},
}


def test_an_arm_is_layered_over_what_all_share():
    grpo, ppo = arm_recipes(
        SHARED,
        {
            "grpo": {"model": {"class_path": "GRPOModule"}},
            "ppo": {
                "title": "PPO with a critic",
                "model": {"class_path": "PPOModule", "init_args": {"lr": 2.0e-3}},
                "data": {"init_args": {"group_size": 1}},
                "trainer": {"callbacks": []},
            },
        },
    )
    assert (grpo.name, grpo.title, ppo.title) == ("grpo", "grpo", "PPO with a critic")
    assert grpo.recipe["model"] == {"class_path": "GRPOModule", "init_args": {"policy": "base", "lr": 1.0e-3}}
    assert ppo.recipe["model"]["init_args"] == {"policy": "base", "lr": 2.0e-3}
    assert ppo.recipe["data"]["init_args"] == {"train": "t.jsonl", "group_size": 1, "temperature": 1.0}
    assert (grpo.recipe["trainer"]["callbacks"], ppo.recipe["trainer"]["callbacks"]) == (
        [{"class_path": "AdaptiveKL"}],
        [],
    )
    assert list(grpo.recipe["model"]) == ["class_path", "init_args"], "the order in which recipes are read"
    assert SHARED["model"]["init_args"] == {"policy": "base", "lr": 1.0e-3}, "what is shared stays as it was"


def test_recipes_may_be_files(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**SHARED, "seed_everything": 7}))
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"lr": 5.0e-3}}}))
    (tmp_path / "arm.yaml").write_text(yaml.safe_dump({"model": {"class_path": "GRPOModule"}}))
    paths = [str(tmp_path / "base.yaml"), str(tmp_path / "more.yaml")]
    layered, plain = arm_recipes(paths, {"layered": str(tmp_path / "arm.yaml"), "plain": None})
    assert layered.recipe["model"] == {"class_path": "GRPOModule", "init_args": {"policy": "base", "lr": 5.0e-3}}
    assert "seed_everything" not in layered.recipe
    assert "class_path" not in plain.recipe["model"]


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"data": {"init_args": {"temperature": 0.7}}}, r"data\.init_args\.temperature \(1\.0 and 0\.7\)"),
        ({"data": {"init_args": {"train": "other.jsonl"}}}, r"data\.init_args\.train"),
        ({"data": {"init_args": {"max_new_tokens": 4}}}, r"data\.init_args\.max_new_tokens \(None and 4\)"),
        ({"data": {"init_args": {"rewards": ["mine"]}}}, r"data\.init_args\.rewards"),
        ({"model": {"init_args": {"policy": "another"}}}, r"model\.init_args\.policy"),
        ({"trainer": {"precision": "bf16-mixed"}}, r"trainer\.precision"),
    ],
)
def test_what_arms_share_may_not_differ(changes, option):
    with pytest.raises(ConfigurationError, match=rf"arms\.one and arms\.two differ in {option}"):
        arm_recipes(SHARED, {"one": {}, "two": changes})


def test_it_may_where_that_is_said():
    changes = {"data": {"init_args": {"temperature": 0.7}}}
    _, two = arm_recipes(SHARED, {"one": {}, "two": changes}, ["data.init_args.temperature"])
    assert two.recipe["data"]["init_args"]["temperature"] == 0.7


def test_group_size_passes_and_micro_batches_are_the_algorithms():
    options = {"group_size": 4, "passes": 2, "prompts_per_iteration": 3, "steps_per_pass": 2, "micro_batch_size": 1}
    assert len(arm_recipes(SHARED, {"one": {}, "two": {"data": {"init_args": options}}})) == 2


@pytest.mark.parametrize(
    ("shared", "arms", "message"),
    [
        (SHARED, {}, "at least one arm"),
        (SHARED, {"a/b": {}}, "names a folder"),
        (SHARED, {"one": {"modle": {}}}, r"arms\.one has no option 'modle'"),
        (SHARED, {"one": "nowhere.yaml"}, r"arms\.one: nowhere\.yaml: No such file"),
        ("nowhere.yaml", {"one": {}}, r"recipe: nowhere\.yaml: No such file"),
    ],
)
def test_bad_arms(shared, arms, message):
    with pytest.raises(ConfigurationError, match=message):
        arm_recipes(shared, arms)


@pytest.mark.parametrize("text", ["- a list", "", "a: [", "\x00"])
def test_a_file_that_is_no_recipe(tmp_path, text):
    path = tmp_path / "arm.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"arms\.one: .*arm\.yaml"):
        arm_recipes(SHARED, {"one": str(path)})
