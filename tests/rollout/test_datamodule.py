from __future__ import annotations

import logging
import random
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning import Callback

from lit_rlhf import GRPOModule, RolloutDataModule
from lit_rlhf.engines.transformers import TransformersEngine
from lit_rlhf.errors import ConfigurationError, DataError, RewardError


class CountingEngine(TransformersEngine):
    def __init__(self):
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    def generate(self, policy, prompts, num_samples, *args):
        self.calls.append((len(prompts), num_samples))
        return super().generate(policy, prompts, num_samples, *args)


# One rollout per epoch


def test_one_rollout_per_epoch(fit, make_data):
    engine = CountingEngine()
    data = make_data(engine=engine, passes=2, steps_per_pass=2, micro_batch_size=5)
    module = fit(data, max_epochs=3)
    assert engine.calls == [(6, 4)] * 3
    assert module.trainer.global_step == 12
    assert data.iteration == 3


def test_one_rollout_per_epoch_with_validation_in_between(fit, make_data, rows):
    engine = CountingEngine()
    data = make_data(engine=engine, val=rows[:3], micro_batch_size=6)
    module = fit(data, max_epochs=2, val_check_interval=2)
    assert [call for call in engine.calls if call == (6, 4)] == [(6, 4)] * 2
    # Before training and twice in each of the two epochs: greedy, then two samples.
    assert [call for call in engine.calls if call != (6, 4)] == [(3, 1), (3, 2)] * 5
    assert module.trainer.global_step == 2


def test_a_rollout_is_kept_until_something_is_drawn_from_it(fit, make_data):
    class AskTwice(RolloutDataModule):
        def train_dataloader(self):
            first = super().train_dataloader()
            assert super().train_dataloader() is first
            return first

    engine = CountingEngine()
    options = {"group_size": 4, "max_new_tokens": 6, "seed": 0, "engine": engine}
    data = AskTwice(make_data().sources["train"], rewards=make_data().scorer.functions, **options)
    fit(data, max_epochs=2)
    assert len(engine.calls) == 2
    assert data.state_dict()["iteration"] == 2


def test_five_prompts_two_per_iteration(fit, make_data, rows, watch):
    engine = CountingEngine()
    fit(make_data(rows[:5], prompts_per_iteration=2, engine=engine), max_epochs=3)
    assert engine.calls == [(2, 4), (2, 4), (1, 4)]
    assert [len(rollout) for rollout in watch.rollouts] == [8, 8, 4]
    drawn = [index for rollout in watch.rollouts for index in rollout.prompt_index[::4].tolist()]
    assert sorted(drawn) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_prompts_than_an_iteration_draws(fit, make_data, rows, watch, weights, count):
    module = fit(make_data(rows[:count], prompts_per_iteration=4, steps_per_pass=2))
    assert [len(rollout) for rollout in watch.rollouts] == [4 * count] * 2
    assert module.trainer.global_step == 4
    assert weights(module).isfinite().all()
    if count == 1:  # the other step of the iteration has nobody to learn from
        assert watch.final["policy/dead_steps"] == 0.5
        assert sorted(watch.denominators)[:2] == [0.0, 0.0]


# What the Trainer must be


def test_the_trainer_reloads_every_epoch_during_fit_only(fit):
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(trainer.reload_dataloaders_every_n_epochs)

    trainer = fit(callbacks=[Look()]).trainer
    assert seen == [1]
    assert trainer.reload_dataloaders_every_n_epochs == 0


@pytest.mark.parametrize(
    ("trainer", "data", "message"),
    [
        (
            {"reload_dataloaders_every_n_epochs": 5},
            {},
            r"reload_dataloaders_every_n_epochs=5 .* write Trainer\(reload_dataloaders_every_n_epochs=1\)",
        ),
        ({"accumulate_grad_batches": 2}, {"micro_batch_size": 3}, "accumulate_grad_batches=2 .* micro_batch_size"),
        ({"accumulate_grad_batches": 2}, {"micro_batch_tokens": 9}, "accumulate_grad_batches=2 .* micro_batch_tokens"),
        ({"limit_train_batches": 2}, {}, "limit_train_batches=2 would throw away part of every rollout"),
        ({"limit_train_batches": 1}, {}, "limit_train_batches=1 would throw away part of every rollout"),
        ({"limit_train_batches": 0.5}, {}, "limit_train_batches=0.5 would throw away part of every rollout"),
        ({}, {"train": None, "val": [{"prompt": "1+1="}]}, r"set RolloutDataModule\(train=...\)"),
    ],
)
def test_contradictions_are_refused_before_a_model_is_loaded(
    make_trainer, make_data, policy_dir, trainer, data, message
):
    module = GRPOModule(policy_dir)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(**trainer).fit(module, make_data(**data))
    assert module.policy is None


def test_accumulate_grad_batches_cuts_each_step(fit, watch):
    module = fit(accumulate_grad_batches=5)
    assert watch.sizes == [5, 5, 5, 5, 4] * 2
    assert module.trainer.global_step == 2


def test_a_trainer_can_be_used_again(make_trainer, make_data, policy_dir, rows):
    trainer = make_trainer()
    trainer.fit(GRPOModule(policy_dir), make_data(micro_batch_size=5))
    assert trainer.accumulate_grad_batches == 1
    module = GRPOModule(policy_dir)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_data(micro_batch_size=7))
    (results,) = trainer.validate(module, make_data(val=rows), verbose=False)
    assert 0.0 <= results["val/accuracy"] <= 1.0


def test_a_trainer_can_be_used_again_after_an_error(make_trainer, make_data, policy_dir):
    def fails(completions):
        raise KeyError("no")

    trainer = make_trainer(accumulate_grad_batches=3)
    with pytest.raises(RewardError):
        trainer.fit(GRPOModule(policy_dir), make_data(rewards=fails))
    assert trainer.accumulate_grad_batches == 3
    assert trainer.limit_val_batches == 1.0


def test_a_dry_run(fit, make_data, rows):
    module = fit(make_data(val=rows, micro_batch_size=5), fast_dev_run=True)
    assert module.trainer.global_step == 1


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts_per_iteration": 0}, "prompts_per_iteration must be at least 1, got 0"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"passes": 0}, "passes must be at least 1, got 0"),
        ({"steps_per_pass": 0}, "steps_per_pass must be at least 1, got 0"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"micro_batch_tokens": -1}, "micro_batch_tokens must be at least 1, got -1"),
        ({"max_prompt_length": 0}, "max_prompt_length must be at least 1, got 0"),
        ({"val_batch_size": 0}, "val_batch_size must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature 0 is greedy: all completions of a prompt are the same"),
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or positive, got -1.0"),
        ({"val_temperature": -0.5}, r"val_temperature must be 0 \(greedy\) or positive, got -0.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; 1 is off, got 0.0"),
        ({"micro_batch_size": 2, "micro_batch_tokens": 9}, "give micro_batch_size or micro_batch_tokens, not both"),
        ({"steps_per_pass": 7}, "steps_per_pass=7 optimizer steps cannot share prompts_per_iteration=6 prompts"),
        ({"val_samples": -1, "pass_k": []}, r"val_samples must be 0 \(greedy only\) or positive, got -1"),
        ({"val_samples": 2, "pass_k": [3]}, "pass_k=3 needs at least 3 val_samples, got 2"),
        ({"val_samples": 2, "pass_k": [0]}, "pass_k=0 needs at least 1 val_samples, got 2"),
        ({"stop": [""]}, "stop strings must not be empty"),
        ({"rewards": []}, "No reward functions were given"),
        ({"reward_weights": [1.0, 2.0]}, "1 reward functions, but 2 reward weights"),
        ({"on_reward_error": "ignore"}, "must be 'raise' or 'abstain', got 'ignore'"),
    ],
)
def test_bad_options(make_data, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_data(**options)


@pytest.mark.parametrize("split", ["train", "val"])
def test_prompt_and_completion_must_fit_into_the_context(make_trainer, make_data, policy_dir, rows, split):
    """The longest prompt has 7 tokens, the context 64: 57 new ones fit, 58 do not."""
    sources = {"train": rows} if split == "train" else {"train": rows[:1], "val": rows}
    module = GRPOModule(policy_dir)
    with pytest.raises(ConfigurationError, match=r"7 tokens; with max_new_tokens=58 that is 65, more than .* 64"):
        make_trainer().fit(module, make_data(**sources, max_new_tokens=58))
    assert module.policy is None
    data = make_data(**sources, max_new_tokens=57, prompts_per_iteration=1, group_size=2)
    make_trainer(num_sanity_val_steps=0, limit_val_batches=0).fit(module, data)
    assert module.trainer.global_step == 1


def test_prompts_over_the_limit_are_dropped_and_counted(fit, make_data, watch, caplog):
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        data = make_data(max_prompt_length=5)
        fit(data, max_epochs=1)
    assert "1 of 6 prompts longer than 5 tokens dropped, longest 7" in caplog.text
    assert len(data.prompts["train"]) == 5
    assert sorted(set(watch.rollouts[0].prompt_index.tolist())) == [0, 1, 3, 4, 5]


def test_prompts_over_the_limit_can_be_an_error(make_trainer, make_data, policy_dir):
    module = GRPOModule(policy_dir)
    with pytest.raises(DataError, match="1 of 6 prompts longer than 5 tokens refused, longest 7"):
        make_trainer().fit(module, make_data(max_prompt_length=5, overlong_prompts="error"))
    with pytest.raises(DataError, match="6 of 6 prompts longer than 3 tokens"):
        make_trainer().fit(module, make_data(max_prompt_length=3))
    assert module.policy is None


# What reward functions are given


def test_a_column_reaches_the_rows_of_its_own_prompt(fit, make_data, rows, watch):
    calls = []

    def look(prompts, completions, completion_ids, answer, **columns):
        calls.append((prompts, completions, completion_ids, answer, columns))
        return [float(len(text)) for text in completions]

    rows = [{**row, "place": place} for place, row in enumerate(rows)]
    fit(make_data(rows, look, prompts_per_iteration=4, micro_batch_size=3), max_epochs=3)
    assert len(calls) == 3
    for (prompts, completions, completion_ids, answer, columns), rollout in zip(calls, watch.rollouts, strict=True):
        for row, prompt in enumerate(prompts):
            left, right = prompt.removesuffix("=").split("+")
            assert answer[row] == str(int(left) + int(right))
            assert rows[columns["place"][row]]["prompt"] == prompt
        assert set(columns) == {"place"}
        assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
        assert rollout.prompts == tuple(prompts)
        assert rollout.completions == tuple(completions)
        lengths = rollout.completion_lengths.tolist()
        assert completion_ids == [ids[:n] for ids, n in zip(rollout.completion_ids.tolist(), lengths, strict=True)]
        assert rollout.rewards.tolist() == [float(len(text)) for text in completions]


def test_ids_and_texts_are_the_same_rows(fit, make_data, watch):
    module = fit(make_data(engine=TransformersEngine(max_rows=8)), max_epochs=1)
    (rollout,) = watch.rollouts
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row, rollout.prompt_ids.shape[1] - rollout.prompt_lengths[row] :]
        assert module.tokenizer.decode(prompt) == rollout.prompts[row]
        ids = rollout.completion_ids[row, : rollout.completion_lengths[row]]
        assert module.tokenizer.decode(ids, skip_special_tokens=True) == rollout.completions[row]


def test_conversational_prompts_get_conversational_completions(fit, make_data, policy_dir, tmp_path, watch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    tokenizer.save_pretrained(tmp_path / "chat")
    AutoModelForCausalLM.from_pretrained(policy_dir).save_pretrained(tmp_path / "chat")
    seen = []

    def look(prompts, completions):
        seen.append((prompts, completions))
        return [len(completion[0]["content"]) / 8 for completion in completions]

    train = [{"prompt": [{"role": "user", "content": f"{n}+1"}]} for n in range(3)]
    fit(make_data(train, look), policy=str(tmp_path / "chat"), max_epochs=1)
    ((prompts, completions),) = seen
    texts = watch.rollouts[0].completions
    assert completions == [[{"role": "assistant", "content": text}] for text in texts]
    assert sorted(prompt[-1]["content"] for prompt in prompts[::4]) == ["0+1", "1+1", "2+1"]


def test_an_argument_that_is_no_column_is_refused_before_a_model_is_loaded(make_trainer, make_data, policy_dir):
    def picky(completions, difficulty):
        raise AssertionError("called")

    module = GRPOModule(policy_dir)
    with pytest.raises(RewardError, match=r"`picky` takes 'difficulty', which is neither .* Columns: answer"):
        make_trainer().fit(module, make_data(rewards=picky))
    with pytest.raises(RewardError, match="`picky` takes 'difficulty'"):
        make_trainer().validate(module, make_data(val=[{"prompt": "1+1="}], verifier=picky))
    assert module.policy is None


# What a rollout leaves alone


def test_validation_does_not_change_training(fit, make_data, rows, weights):
    without = fit(make_data(), max_epochs=3)
    with_validation = fit(make_data(val=rows[:4]), max_epochs=3, check_val_every_n_epoch=1)
    assert torch.equal(weights(without), weights(with_validation))


def test_runs_of_one_seed_are_the_same_run(fit, make_data, weights, watch):
    runs = [weights(fit(make_data(seed=seed, passes=2))) for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    first, again, other = watch.rollouts[0], watch.rollouts[2], watch.rollouts[4]
    assert first.completions == again.completions != other.completions


def test_the_seed_is_that_of_seed_everything(fit, make_data, weights, monkeypatch):
    explicit = weights(fit(make_data(seed=11)))
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    assert torch.equal(weights(fit(make_data(seed=None))), explicit)


class Snapshots(RolloutDataModule):
    """Compares what a rollout must leave as it was."""

    def state(self):
        module = self.trainer.lightning_module
        modes = {name: child.training for name, child in module.named_modules()}
        numpy_state = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
        return modes, torch.get_rng_state().tolist(), random.getstate(), numpy_state, torch.is_grad_enabled()

    def train_dataloader(self):
        before = self.state()
        loader = super().train_dataloader()
        self.before, self.after = before, self.state()
        return loader


def test_random_states_and_modes_are_what_they_were(make_trainer, policy_dir, rows, digits):
    class OneLayerInEvaluationMode(L.Callback):
        def on_sanity_check_start(self, trainer, pl_module):
            pl_module.policy.model.layers[1].eval()

    data = Snapshots(rows, val=rows, rewards=digits, group_size=2, max_new_tokens=4, seed=0)
    make_trainer(callbacks=[OneLayerInEvaluationMode()]).fit(GRPOModule(policy_dir), data)
    modes = data.before[0]
    assert modes["policy.model.layers.0.mlp"]
    assert not modes["policy.model.layers.1.mlp"]
    assert not modes["reference.model.model.layers.0"]
    assert data.before == data.after


def test_prompts_from_a_file(fit, make_data, rows, tmp_path: Path, watch):
    import json

    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": row["prompt"]}) + "\n" for row in rows))
    fit(make_data(file, prompt_column="question"), max_epochs=1)
    assert sorted(set(watch.rollouts[0].prompts)) == sorted(row["prompt"] for row in rows)


def test_an_engine_that_is_not_installed_is_said_before_a_model_is_loaded(
    make_trainer, make_data, policy_dir, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    module = GRPOModule(policy_dir)
    with pytest.raises(ConfigurationError, match=r"needs vLLM, which is not installed: pip install 'lit-rlhf\[vllm\]'"):
        make_trainer().fit(module, make_data(engine="vllm"))
    assert module.policy is None
