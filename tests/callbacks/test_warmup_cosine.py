from __future__ import annotations

import csv

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.callbacks import WarmupCosine
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import warmup_cosine


class Rates(L.Callback):
    """The learning rate that each optimizer step uses."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


class Line(L.LightningModule):
    """A plain module, without any of this library's."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def expected(steps, total, warmup, lr=1e-3, floor=0.0):
    return pytest.approx([lr * warmup_cosine(step, total, warmup, floor) for step in steps], rel=1e-12)


def test_each_step_uses_its_own_rate(fit, make_data):
    rates = Rates()
    schedule = WarmupCosine(warmup_steps=3, floor=0.1)
    fit(make_data(passes=2, steps_per_pass=2, micro_batch_size=5), [schedule, rates], max_epochs=3)
    assert rates.seen == expected(range(12), 12, 3, floor=0.1)
    assert rates.seen[0] == pytest.approx(1e-3 / 3)


def test_the_module_brings_it_with_its_own_ratio(fit, make_data):
    rates = Rates()
    fit(make_data(steps_per_pass=5), [rates], max_epochs=2, module={"warmup_ratio": 0.4})
    assert rates.seen == expected(range(10), 10, 4)


def test_the_length_is_the_shorter_of_epochs_and_steps(fit, make_data):
    rates = Rates()
    fit(make_data(steps_per_pass=2), [WarmupCosine(0.0), rates], max_epochs=10, max_steps=4)
    assert rates.seen == expected(range(4), 4, 0)


def test_a_length_of_its_own(fit):
    rates = Rates()
    fit(None, [WarmupCosine(warmup_ratio=0.5, total_steps=4), rates], max_epochs=6)
    assert rates.seen == expected(range(6), 4, 2)
    assert rates.seen[4:] == [0.0, 0.0]


@pytest.mark.parametrize("monitor_first", [True, False])
def test_the_monitor_logs_the_rate_of_each_step(fit, make_data, tmp_path, monitor_first):
    rates = Rates()
    callbacks = [LearningRateMonitor("step"), WarmupCosine(warmup_steps=2)]
    logger = CSVLogger(tmp_path)
    callbacks = [*(callbacks if monitor_first else callbacks[::-1]), rates]
    fit(make_data(steps_per_pass=2), callbacks, max_epochs=3, logger=logger, log_every_n_steps=1)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        logged = [float(row["lr-AdamW/policy"]) for row in csv.DictReader(file) if row["lr-AdamW/policy"]]
    assert logged == pytest.approx(rates.seen)
    assert rates.seen == expected(range(6), 6, 2)


def test_parameter_groups_have_schedules_of_their_own(make_trainer, make_data, policy_dir, tmp_path):
    """The critic's rate rises for four steps and falls to a floor, the policy's falls from the start."""

    class Both(L.Callback):
        def __init__(self):
            self.seen = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen.append({group["name"]: group["lr"] for group in optimizer.param_groups})

    rates = Both()
    schedules = [WarmupCosine(0.0, groups=["policy"]), WarmupCosine(warmup_steps=4, floor=0.5, groups=["value"])]
    logger = CSVLogger(tmp_path)
    options = {"max_epochs": 4, "callbacks": [*schedules, LearningRateMonitor("step"), rates], "logger": logger}
    module = PPOModule(policy_dir, lr=1e-4, critic_lr=1e-3, critic="shared")
    make_trainer(**options, log_every_n_steps=1).fit(module, make_data(passes=2))
    assert [seen["policy"] for seen in rates.seen] == expected(range(8), 8, 0, lr=1e-4)
    assert [seen["value"] for seen in rates.seen] == expected(range(8), 8, 4, lr=1e-3, floor=0.5)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        logged = [row for row in csv.DictReader(file) if row["lr-AdamW/value"]]
    for name in ("policy", "value"):
        assert [float(row[f"lr-AdamW/{name}"]) for row in logged] == pytest.approx([seen[name] for seen in rates.seen])


def test_a_group_that_no_schedule_names_keeps_its_rate(make_trainer, make_data, policy_dir):
    trainer = make_trainer(max_epochs=3, callbacks=[WarmupCosine(0.0, groups=["policy"])])
    trainer.fit(PPOModule(policy_dir, lr=1e-4, critic_lr=1e-3, critic="shared"), make_data())
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.0, 1e-3]


def test_an_unknown_group_is_refused(fit, make_data):
    data = make_data()
    with pytest.raises(ConfigurationError, match="no parameter group 'critic', GRPOModule has 'policy'"):
        fit(data, [WarmupCosine(groups=["critic"])])
    assert data.rollout is None


def test_a_longer_run_continues_the_longer_curve(fit, make_data, tmp_path):
    first, second, whole = Rates(), Rates(), Rates()
    keep = ModelCheckpoint(tmp_path / "kept", save_last=True)
    short = {"max_epochs": 2, "enable_checkpointing": True}
    fit(make_data(steps_per_pass=2), [WarmupCosine(warmup_steps=1), first, keep], **short)
    assert first.seen == expected(range(4), 4, 1)
    options = {"max_epochs": 5, "ckpt_path": str(tmp_path / "kept" / "last.ckpt")}
    fit(make_data(steps_per_pass=2), [WarmupCosine(warmup_steps=1), second], **options)
    assert second.seen == expected(range(4, 10), 10, 1)
    fit(make_data(steps_per_pass=2), [WarmupCosine(warmup_steps=1), whole], max_epochs=5)
    assert second.seen == pytest.approx(whole.seen[4:])


def test_alone_in_a_plain_trainer(make_trainer):
    rates = Rates()
    loader = torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=2)
    make_trainer(max_epochs=4, callbacks=[WarmupCosine(warmup_steps=2), rates]).fit(Line(), loader)
    assert rates.seen == expected(range(12), 12, 2, lr=0.5)


def test_alone_with_accumulation(make_trainer):
    rates = Rates()
    loader = torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=1)
    options = {"max_epochs": 2, "accumulate_grad_batches": 3}
    make_trainer(callbacks=[WarmupCosine(0.25), rates], **options).fit(Line(), loader)
    assert rates.seen == expected(range(4), 4, 1, lr=0.5)


def test_an_endless_run_is_refused_before_a_rollout(make_trainer, make_data, policy_dir):
    data = make_data()
    with pytest.raises(
        ConfigurationError, match=r"max_epochs or max_steps, add TokenBudget, or set WarmupCosine\(total"
    ):
        make_trainer(max_epochs=-1).fit(GRPOModule(policy_dir), data)
    assert data.rollout is None


def test_an_endless_run_with_a_length_of_the_schedule(make_data, policy_dir, make_trainer, capsys):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 3

    rates = Rates()
    trainer = make_trainer(max_epochs=-1, callbacks=[WarmupCosine(0.0, total_steps=2), rates, Stop()])
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data())
    assert rates.seen == expected(range(3), 2, 0)
    assert "until stopped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_ratio": 1.5}, r"warmup_ratio must lie in \[0, 1\], got 1.5"),
        ({"floor": -0.1}, r"floor must lie in \[0, 1\], got -0.1"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        WarmupCosine(**options)
