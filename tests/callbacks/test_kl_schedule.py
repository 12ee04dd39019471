from __future__ import annotations

import pytest

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import KLSchedule, RolloutCallback
from lit_rlhf.errors import ConfigurationError


class Coefficients(RolloutCallback):
    """The coefficients of the micro-batches of each iteration."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append(set())
        self.seen[-1].add(batch.rows.kl_coef)


@pytest.mark.parametrize("placement", ["reward", "loss"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start": 0.01, "end": 0.09}, [0.01, 0.03, 0.05, 0.07, 0.09]),
        ({"start": 0.01, "end": 0.16, "shape": "geometric"}, [0.01, 0.02, 0.04, 0.08, 0.16]),
        ({"start": 0.02, "end": 0.06, "shape": "cosine", "iterations": 3}, [0.02, 0.04, 0.06, 0.06, 0.06]),
        ({"start": 0.02, "end": 0.06, "iterations": 1}, [0.02, 0.06, 0.06, 0.06, 0.06]),
    ],
)
def test_one_coefficient_per_iteration_along_the_curve(fit, make_data, options, expected, placement):
    seen = Coefficients()
    data = make_data(micro_batch_size=5, passes=2)
    fit(data, [KLSchedule(**options), seen], module={"kl_placement": placement}, max_epochs=5)
    assert all(len(coefficients) == 1 for coefficients in seen.seen)
    assert [coefficients.pop() for coefficients in seen.seen] == pytest.approx(expected)


def test_max_steps_is_a_length_too(fit, make_data):
    seen = Coefficients()
    fit(make_data(steps_per_pass=2), [KLSchedule(0.1, 0.3), seen], max_epochs=-1, max_steps=6)
    assert [coefficients.pop() for coefficients in seen.seen] == pytest.approx([0.1, 0.2, 0.3])


def test_the_penalty_is_the_schedules(fit, watch):
    """The modules own coefficient does not enter: the same run as with another one."""
    logged = []
    for kl_coef in (0.04, 0.5):
        fit(None, [KLSchedule(0.1, 0.3)], module={"kl_coef": kl_coef, "lr": 1e-2}, max_epochs=3)
        logged.append({name: value for name, value in watch.final.items() if name in ("loss", "kl", "kl/coef")})
    assert logged[0] == logged[1]
    assert logged[0]["kl/coef"] == pytest.approx(0.3)


def test_resume_continues_the_curve(resumed_equals_uninterrupted, make_data):
    logged, _ = resumed_equals_uninterrupted(lambda: [KLSchedule(0.05, 0.25)], make_data)
    assert [metrics["kl/coef"] for metrics in logged] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.0, "end": 0.1}, r"KLSchedule: start must be a number in \(0, inf\), got 0"),
        ({"start": 0.1, "end": -1}, r"KLSchedule: end must be a number in \(0, inf\), got -1"),
        ({"start": 0.1, "end": 1, "iterations": 0}, "KLSchedule: iterations must be a number in"),
        ({"start": 0.1, "end": 1, "shape": "step"}, "KLSchedule: shape must be one of linear, cosine, geometric, got"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        KLSchedule(**options)


def test_refused_before_a_model_is_loaded(make_trainer, make_data, policy_dir):
    module = GRPOModule(policy_dir, kl_coef=0.0)
    with pytest.raises(ConfigurationError, match="KLSchedule needs a reference: set the module's kl_coef"):
        make_trainer(callbacks=[KLSchedule(0.1, 0.2)]).fit(module, make_data())
    with pytest.raises(ConfigurationError, match=r"KLSchedule needs the length of the run: .* KLSchedule\(iterations"):
        make_trainer(max_epochs=-1, callbacks=[KLSchedule(0.1, 0.2)]).fit(GRPOModule(policy_dir), make_data())
    assert module.policy is None
