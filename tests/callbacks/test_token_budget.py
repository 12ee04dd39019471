from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import RolloutCallback, TokenBudget, WarmupCosine
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import warmup_cosine


class Count(RolloutCallback):
    """Tokens of each rollout and the rate of each optimizer step."""

    def __init__(self):
        self.tokens, self.rates, self.validated = [], [], []

    def on_advantages_end(self, trainer, module, rollout):
        self.tokens.append(int(rollout.completion_lengths.sum()))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated.append(trainer.current_epoch)


@pytest.mark.parametrize("budget", [1, 300, 400])
def test_a_run_ends_with_the_iteration_that_reaches_it(fit, make_data, rows, budget):
    count, callback = Count(), TokenBudget(budget)
    data = make_data(val=rows[:2])
    fit(data, [callback, count], max_epochs=-1, check_val_every_n_epoch=50)
    assert sum(count.tokens) >= budget
    assert sum(count.tokens[:-1]) < budget
    assert callback.generated == sum(count.tokens)
    assert count.validated == [len(count.tokens) - 1], "the last iteration, and no other"


def test_max_epochs_may_come_first(fit):
    count, callback = Count(), TokenBudget(10**9)
    fit(None, [callback, count], max_epochs=2)
    assert callback.generated == sum(count.tokens)
    assert len(count.tokens) == 2


def test_the_schedule_ends_with_the_budget(fit, make_data):
    """Every iteration asks how far its tokens have brought the run."""
    count, budget = Count(), 500
    fit(make_data(steps_per_pass=3), [TokenBudget(budget), WarmupCosine(0.1, floor=0.2), count], max_epochs=-1)
    assert len(count.tokens) > 3
    expected, before = [], 0
    for tokens in count.tokens:
        per_step = tokens / 3
        total = budget / per_step
        expected += [
            1e-3 * warmup_cosine(before / per_step + step, total, round(0.1 * total), 0.2) for step in range(3)
        ]
        before += tokens
    assert count.rates == pytest.approx(expected, rel=1e-12)


def test_with_equal_lengths_it_is_the_schedule_of_the_steps(fit, make_data, monkeypatch):
    """Completions that never end early: tokens and steps say the same."""
    monkeypatch.setattr("lit_rlhf.rollout.datamodule.eos_token_ids", lambda *args, **kwargs: ())
    by_steps, by_tokens = Count(), Count()
    fit(make_data(), [WarmupCosine(0.2), by_steps], max_epochs=5)
    assert set(by_steps.tokens) == {24 * 6}
    fit(make_data(), [TokenBudget(5 * 24 * 6), WarmupCosine(0.2), by_tokens], max_epochs=-1)
    assert by_tokens.rates == pytest.approx(by_steps.rates, rel=1e-12)


@pytest.mark.parametrize("every", [{"every_n_epochs": 1}, {"every_n_train_steps": 6}], ids=["epoch", "step"])
def test_a_resumed_run_is_the_same_run(fit, make_data, weights, tmp_path, every):
    def run(ckpt_path=None, callbacks=()):
        count, budget = Count(), TokenBudget(500)
        options = {"enable_checkpointing": True, "max_epochs": -1, "ckpt_path": ckpt_path}
        module = fit(make_data(steps_per_pass=3), [budget, count, *callbacks], **options)
        return weights(module), count, budget

    saves = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", save_top_k=-1, **every)
    expected, whole, budget = run(callbacks=[saves])
    found, rest, resumed = run(str(tmp_path / "kept" / "epoch=1.ckpt"))
    assert rest.rates == whole.rates[-len(rest.rates) :]
    assert resumed.generated == budget.generated
    assert (found == expected).all()


def test_the_trainer_gets_its_option_back(make_trainer, make_data, policy_dir, rows):
    trainer = make_trainer(callbacks=[TokenBudget(100)], max_epochs=-1, check_val_every_n_epoch=7)
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data(val=rows[:2]))
    assert trainer.check_val_every_n_epoch == 7


def test_bad_options():
    with pytest.raises(ConfigurationError, match="TokenBudget: tokens must be"):
        TokenBudget(0)


def test_two_of_them_are_refused(fit):
    with pytest.raises(ConfigurationError, match="both set the token budget"):
        fit(None, [TokenBudget(10), type("Other", (TokenBudget,), {})(20), L.Callback()])
