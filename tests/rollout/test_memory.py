"""From a module and its rollouts to memory: counted exactly where it can be, near the measured peak as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lit_rlhf import GRPOModule, PPOModule, RolloutDataModule
from lit_rlhf.engines import TransformersEngine, VLLMEngine, VLLMServers
from lit_rlhf.models.memory import GIB, memory_of
from lit_rlhf.rewards import RewardModel
from lit_rlhf.rollout.memory import memory_line, workload
from tests.rollout import memory_worker

ROOT = Path(__file__).parents[2]
CLASSIFIER = ROOT / "checkpoints" / "arithmetic-reward"


@pytest.fixture
def work_of(policy_dir, make_data):
    """The workload of a module with some options, on some data."""

    def build(kind=GRPOModule, prompt_length=10, data=None, placement="one", devices=1, precision="32-true", **options):
        module = kind(policy_dir, **options)
        where = {"placement": placement, "devices": devices, "precision": precision, "cpu": True}
        return workload(module, make_data(**(data or {})), prompt_length, **where)

    return build


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GRPOModule, {}),
        (GRPOModule, {"kl_coef": 0.0}),
        (GRPOModule, {"lora_rank": 3}),
        (GRPOModule, {"dtype": "bfloat16", "lora_rank": 3, "lora_target_modules": ["q_proj", "down_proj"]}),
        (PPOModule, {"critic": "own"}),
        (PPOModule, {"critic": "shared"}),
        (PPOModule, {"critic": "adapter", "lora_rank": 3}),
        (PPOModule, {"critic": "own", "lora_rank": 3}),
    ],
)
def test_weights_gradients_and_moments_are_exact(kind, options, make_trainer, make_data, policy_dir):
    module, data = kind(policy_dir, **options), make_data()
    trainer = make_trainer()
    trainer.fit(module, data)
    memory = memory_of(workload(module, data, 10, cpu=True))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    moments = [
        value for state in trainer.optimizers[0].state.values() for name, value in state.items() if name != "step"
    ]
    assert memory.weights + memory.reference + memory.critic == sum(p.nbytes for p in module.parameters())
    assert memory.gradients == sum(parameter.nbytes for parameter in trained)
    assert memory.optimizer == sum(moment.nbytes for moment in moments)


def test_a_micro_batch_is_as_large_as_it_may_be(work_of):
    # 6 prompts of 10 tokens, 4 completions of 6 tokens each.
    assert work_of().tokens == 6 * 10 + 24 * 6
    assert work_of(data={"micro_batch_tokens": 100}).tokens == 100
    assert work_of(data={"micro_batch_size": 8}).tokens == 2 * 10 + 8 * 6
    assert work_of(data={"steps_per_pass": 3}).tokens == 2 * 10 + 8 * 6
    assert work_of(placement="ddp", devices=2).tokens == 3 * 10 + 12 * 6


def test_completions_of_one_prompt_are_sampled_together(work_of):
    def batch(devices=1, **engine):
        work = work_of(placement="ddp", devices=devices, data={"engine": TransformersEngine(**engine)})
        return work.rows, work.prompts

    assert batch() == (24, 6)
    assert batch(devices=4) == (8, 2)
    assert batch(max_rows=11) == (8, 2)
    assert batch(max_rows=2) == (4, 1)
    assert batch(max_tokens=2 * (10 + 4 * 6)) == (8, 2)


def test_what_the_precision_changes(work_of):
    true, mixed = work_of(precision="bf16-true", lora_rank=2), work_of(precision="bf16-mixed")
    assert (true.weight_bytes, true.compute_bytes, true.adapter_bytes) == (2, 2, 2)
    assert (mixed.weight_bytes, mixed.compute_bytes, mixed.mixed) == (4, 2, True)
    low = work_of(dtype="bfloat16", lora_rank=2)
    assert (low.weight_bytes, low.compute_bytes, low.adapter_bytes) == (2, 2, 4)


def test_a_trained_adapter_has_a_frozen_copy_as_its_reference(work_of, policy_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    from lit_rlhf.models.lora import add_lora

    add_lora(AutoModelForCausalLM.from_pretrained(policy_dir), 2).save_pretrained(tmp_path)
    memory = memory_of(work_of(adapter=str(tmp_path)))
    assert memory.reference == memory.gradients > 0


def test_reward_models_are_counted(work_of, policy_dir):
    data = RolloutDataModule([{"prompt": "1"}], rewards=[RewardModel(str(CLASSIFIER))])
    work = workload(GRPOModule(policy_dir), data, 5)
    assert work.reward_bytes == sum(parameter.nbytes for parameter in data.scorer.functions[0].model.parameters())
    assert memory_of(work).reward_model == work.reward_bytes
    assert f"reward model {work.reward_bytes / 2**20:.1f}" in memory_line(memory_of(work))


def test_the_banner_says_what_plan_says(fit, make_data, capsys, policy_dir):
    data = make_data()
    module = fit(data, max_epochs=1)
    banner = capsys.readouterr().out.split("results")[0]
    longest = max(len(prompt.ids) for prompt in data.prompts["train"].prompts)
    line = memory_line(memory_of(workload(module, data, longest, cpu=True)))
    assert line.split(":")[0] in banner
    assert "logits" not in banner


@pytest.mark.slow
@pytest.mark.parametrize("scenario", memory_worker.SCENARIOS)
def test_the_peak_is_near_what_is_measured(scenario):
    """Of a process of its own, beyond what libraries and a smaller run before it took."""
    large_blocks = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed memory goes back
    environment = {**os.environ, **large_blocks, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, memory_worker.__file__, scenario]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["expected"] == found["exact"]
    assert 0.9 * found["peak"] <= found["estimate"] <= 1.4 * found["peak"]


def test_a_module_says_whether_rollouts_are_sharded(work_of):
    where = {"placement": "fsdp2", "devices": 2}
    assert not work_of(**where).sharded_rollouts
    assert work_of(rollout_weights="sharded", **where).sharded_rollouts


def test_who_samples_takes_memory_for_it(work_of):
    own = memory_of(work_of())
    servers = memory_of(work_of(data={"engine": VLLMServers("http://host:8000")}))
    assert (servers.cache, servers.sampling, servers.engine) == (0, 0, 0)
    assert servers.resident == own.resident
    on_gpu = replace(work_of(data={"engine": VLLMEngine(gpu_memory_utilization=0.25)}), cpu=False)
    least = memory_of(on_gpu).engine
    assert least > own.weights
    shared = memory_of(replace(on_gpu, device_bytes=10 * GIB))
    assert shared.engine == 2.5 * GIB > least
    assert shared.training - shared.engine == memory_of(replace(on_gpu, sampler="servers")).training
    asleep = memory_of(replace(on_gpu, device_bytes=10 * GIB, sampler_sleeps=True))
    assert asleep.training == shared.training - shared.engine
    assert asleep.rollout == shared.rollout
