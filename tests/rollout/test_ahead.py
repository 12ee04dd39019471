"""Completions that are sampled while the policy learns: whose they are, what they weigh, and that they are not lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf.callbacks import DifficultySampler, DynamicSampling, GracefulStop, ResumeGuard, RolloutCallback
from lit_rlhf.engines import TransformersEngine
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.errors import ConfigurationError, EngineLostError
from lit_rlhf.functional.importance import sampling_weights
from lit_rlhf.models.forward import completion_outputs
from tests.rollout.elsewhere import Elsewhere

CORRECTED = {"sampling_correction": "token_truncate", "lr": 1e-2}


class Keep(RolloutCallback):
    """The policy as it is when each rollout is ready, and the metrics of each iteration."""

    def __init__(self) -> None:
        self.policies: list[Any] = []
        self.metrics: list[dict[str, float]] = []

    def on_advantages_end(self, trainer: Any, module: Any, rollout: Any) -> None:
        self.policies.append(copy.deepcopy(module.policy))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append(dict(pl_module.iteration_values))


def test_completions_are_those_of_the_weights_of_one_iteration_ago(fit, make_data, watch):
    keep, data = Keep(), make_data(engine=Elsewhere(), staleness=1)
    module = fit(data, [keep], module=CORRECTED, max_epochs=4)
    assert [metrics["sampling/staleness"] for metrics in keep.metrics] == [0, 1, 1, 1]
    assert keep.metrics[0]["sampling/log_prob_gap"] < 1e-5 < 1e-2 < keep.metrics[1]["sampling/log_prob_gap"]
    for iteration, rollout in enumerate(watch.rollouts):
        sampled_by, learning = keep.policies[max(0, iteration - 1)], keep.policies[iteration]
        prompts = [data.prompts["train"][place] for place in data.sampler.draw(iteration)]
        keys = row_keys(data.seed, 0, iteration, [prompt.index for prompt in prompts], 4)
        with torch.no_grad():
            ids = [prompt.ids for prompt in prompts]
            expected = TransformersEngine().generate(sampled_by, ids, 4, data.sampling, keys, module.tokenizer)
            old = completion_outputs(learning, rollout, 1.0).log_probs
        assert torch.equal(rollout.completion_ids, expected.completion_ids)
        assert torch.equal(rollout.sampling_log_probs, expected.log_probs)
        torch.testing.assert_close(rollout.old_log_probs, old, rtol=0, atol=1e-5)
        weights, _ = sampling_weights(old, expected.log_probs, rollout.completion_mask, "token_truncate", 0.0, 2.0)
        torch.testing.assert_close(rollout.loss_weights, weights, rtol=1e-4, atol=1e-5)


def test_nothing_is_begun_that_no_iteration_takes(fit, make_data):
    for limits in ({"max_epochs": 3}, {"max_epochs": -1, "max_steps": 6}):
        data = make_data(engine=Elsewhere(), staleness=1, steps_per_pass=2)
        fit(data, module=CORRECTED, **limits)
        assert data.engine.events == ["generate", "start", "finish", "start", "finish"]


def test_what_is_begun_is_dropped_where_a_run_stops_early(fit, make_data):
    class Stop(RolloutCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    data = make_data(engine=Elsewhere(), staleness=1)
    fit(data, [Stop()], module=CORRECTED, max_epochs=3)
    assert data.engine.events == ["generate", "start", "cancel"]


def test_validation_waits_until_the_engine_has_finished(fit, make_data, rows):
    data = make_data(engine=Elsewhere(), staleness=1, val=rows[:2], val_samples=0)
    fit(data, module=CORRECTED, max_epochs=2)
    validation = ["generate"]
    assert data.engine.events == [*validation, "generate", "start", "finish", *validation, *validation]


def test_groups_that_are_drawn_again_are_of_the_moment(fit, make_data, watch):
    def some(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) * (len(prompt) != 4) for text, prompt in zip(completions, prompts, strict=True)]

    redraw = DynamicSampling(replace_with="same_prompt", max_attempts=1)
    fit(make_data(rewards=some, engine=Elsewhere(), staleness=1), [redraw], module=CORRECTED, max_epochs=2)
    first, second = watch.rollouts
    assert set(first.staleness.tolist()) == {0}
    assert set(second.staleness.tolist()) <= {0, 1}
    assert 1 in second.staleness.tolist()


@pytest.mark.parametrize("every", ["epoch", "validation"])
def test_resumed_equals_uninterrupted(fit, make_data, rows, tmp_path, weights, every):
    def run(folder: Any, **options: Any) -> tuple[Any, list[dict[str, float]]]:
        keep = Keep()
        saving = ModelCheckpoint(
            folder, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=every == "epoch"
        )
        data = make_data(rows, val=rows[:2], engine=Elsewhere(), staleness=1, prompts_per_iteration=4)
        callbacks = [keep, saving]
        module = fit(data, callbacks, module=CORRECTED, max_epochs=4, enable_checkpointing=True, **options)
        return module, [
            {n: v for n, v in metrics.items() if not n.startswith(("time/", "memory/")) and "per_second" not in n}
            for metrics in keep.metrics
        ]

    whole, seen = run(tmp_path / "whole")
    saved = torch.load(tmp_path / "whole" / "epoch=1.ckpt", weights_only=True)["RolloutDataModule"]
    assert saved["ahead"]["iteration"] == saved["iteration"] == 2
    assert [len(group["ids"]) for group in saved["ahead"]["groups"]] == [4] * 4
    resumed, again = run(tmp_path / "again", ckpt_path=str(tmp_path / "whole" / "epoch=1.ckpt"))
    assert torch.equal(weights(whole), weights(resumed))
    # After a checkpoint of validation Lightning ends the epoch once more, with nothing to log.
    assert [metrics for metrics in again if metrics] == seen[2:]


def test_saved_before_its_first_step_an_iteration_is_taken_again(fit, make_data, tmp_path, weights, digits):
    """A reward function raises once; what it would have judged, and what has been begun since, are as they were."""
    broken = [3]

    def sometimes(completions: list[str], **columns: Any) -> list[float]:
        broken[0] -= 1
        if broken[0] == 0:
            raise ConnectionError("the reward service is gone")
        return digits(completions)

    def run(rewards: Any, **options: Any) -> Any:
        saving = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_epochs=9)
        data = make_data(rewards=rewards, engine=Elsewhere(), staleness=1)
        return fit(data, [saving], module=CORRECTED, max_epochs=4, enable_checkpointing=True, **options)

    whole = run(digits)
    with pytest.raises(Exception, match="the reward service is gone"):
        run(sometimes)
    checkpoint = tmp_path / "epoch=2-step=2.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["RolloutDataModule"]
    assert saved["iteration"] == saved["ahead"]["iteration"] == 2
    assert torch.equal(weights(whole), weights(run(sometimes, ckpt_path=str(checkpoint))))


def test_a_lost_engine_leaves_a_checkpoint_to_go_on_from(fit, make_data, tmp_path, watch):
    class Lost(Elsewhere):
        def start(self, *arguments: Any) -> Any:
            later = super().start(*arguments)
            if self.events.count("start") == 2:
                later.result = self.lost
            return later

        def lost(self) -> Any:
            raise EngineLostError("no server has answered")

    with pytest.raises(EngineLostError, match="no server has answered"):
        fit(make_data(engine=Lost(), staleness=1), [GracefulStop()], module=CORRECTED, max_epochs=4)
    (checkpoint,) = tmp_path.rglob("interrupted.ckpt")
    assert torch.load(checkpoint, weights_only=True)["RolloutDataModule"] == {"iteration": 2}
    watch.rollouts.clear()
    fit(make_data(engine=Elsewhere(), staleness=1), module=CORRECTED, max_epochs=4, ckpt_path=str(checkpoint))
    assert [set(rollout.staleness.tolist()) for rollout in watch.rollouts] == [{0}, {1}]


def test_completions_of_other_prompts_are_not_taken(fit, make_data, rows, tmp_path, watch, caplog):
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1)
    options = {"engine": Elsewhere(), "staleness": 1}
    fit(make_data(rows, **options), [saving], module=CORRECTED, max_epochs=3, enable_checkpointing=True)
    watch.rollouts.clear()
    checkpoint = str(tmp_path / "epoch=1.ckpt")
    other = make_data(rows, group_size=3, **options)
    fit(other, [ResumeGuard(["group_size"])], module=CORRECTED, max_epochs=3, ckpt_path=checkpoint)
    assert set(watch.rollouts[0].staleness.tolist()) == {0}
    assert "of other prompts" in caplog.text


@pytest.mark.parametrize(
    ("data", "module", "callbacks", "message"),
    [
        ({"staleness": 2}, {}, [], "staleness must be 0 or 1, got 2"),
        ({"staleness": 1}, {}, [], "TransformersEngine samples on the policy's own devices: use .*VLLMServers"),
        ({"staleness": 1, "engine": Elsewhere()}, {}, [], "set the module's sampling_correction to token_truncate"),
        (
            {"staleness": 1, "engine": Elsewhere()},
            CORRECTED,
            [DifficultySampler()],
            "DifficultySampler draws prompts by what the iteration before has shown, staleness: 1",
        ),
    ],
    ids=["value", "engine", "correction", "difficulty"],
)
def test_what_cannot_be_is_refused(fit, make_data, data, module, callbacks, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(make_data(**data), callbacks, module=module)
