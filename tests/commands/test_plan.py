"""What a recipe takes of each device's memory, for recipes of real size whose models are not here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from lit_rlhf.commands.plan_choices import changes, fewest_devices, variants
from lit_rlhf.models.memory import GIB, memory_of
from lit_rlhf.models.shape import shape_of
from lit_rlhf.models.workload import Workload

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "recipes" / "models"
REAL = sorted(path for name in ("grpo", "ppo") for path in (ROOT / "recipes" / name).glob("*.yaml"))
QUICKSTARTS = [ROOT / "recipes" / "quickstart" / f"{name}.yaml" for name in ("grpo", "ppo")]
COLUMNS = ["this recipe", "GRPO full", "GRPO LoRA", "GRPO QLoRA", "PPO full", "PPO LoRA", "PPO QLoRA"]


@pytest.fixture
def plan(command, monkeypatch):
    """Runs the command from the root; gives its exit code, what it wrote, and the table by row and column."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["lit-rlhf"])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)

    def run(*words):
        code, said = command("plan", *words)
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line[:1] == "│"]
        return code, said, {name: dict(zip(COLUMNS, cells, strict=True)) for name, *cells in rows}

    return run


@pytest.fixture(scope="module")
def llama_70b():
    return shape_of(AutoConfig.for_model(**json.loads((MODELS / "llama3_70b.json").read_text())))


def model_of(recipe):
    text = recipe.read_text(encoding="utf-8")
    if "policy: meta-llama/Llama-3.3-70B-Instruct" in text:
        return MODELS / "llama3_70b.json"
    name = re.search(r"policy: Qwen/(Qwen2.5-[\d.]+B)-Instruct", text)
    return MODELS / f"{name[1].lower().replace('-', '_')}.json"


@pytest.mark.parametrize("recipe", REAL, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_recipes_of_real_size_fit_the_hardware_that_they_name(recipe, plan):
    hardware = re.search(r"# Hardware  (one GPU|\d+ GPUs) with (\d+) GB", recipe.read_text(encoding="utf-8"))
    code, said, table = plan("-c", recipe, "--model-config", model_of(recipe), "--device-memory", hardware[2])
    assert code == 0, said
    count = "one device" if hardware[1] == "one GPU" else f"over {hardware[1].split()[0]} devices"
    assert count in said
    assert "This recipe fits" in said
    assert table["fits"]["this recipe"] == "yes"
    said_there = re.search(r"# Memory +about (\d+) GiB", recipe.read_text(encoding="utf-8"))
    assert round(float(table["peak"]["this recipe"])) == int(said_there[1])
    config = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]
    algorithm = config["class_path"].rpartition(".")[2].removesuffix("Module")
    way = "LoRA" if config["init_args"].get("lora_rank") else "full"
    assert table["peak"]["this recipe"] == table["peak"][f"{algorithm} {way}"]


@pytest.mark.parametrize("recipe", QUICKSTARTS, ids=lambda path: path.stem)
def test_quickstarts(recipe, plan):
    code, said, table = plan("-c", recipe)
    assert code == 0
    assert "658,432 parameters; one device" in said
    assert "(the longest in the file)" in said
    assert "MiB on each device" in said
    assert table["weights"]["this recipe"] == f"{4 * 658_432 / 2**20:.1f}"
    assert table["reference"]["GRPO LoRA"] == table["critic"]["GRPO full"] == "-"
    assert "fits" not in table


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_there_are_recipes_of_three_sizes(algorithm):
    assert {model_of(recipe).stem for recipe in REAL if recipe.parent.name == algorithm} == {
        "qwen2.5_0.5b",
        "qwen2.5_7b",
        "llama3_70b",
    }


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_recipes_of_70b_as_qlora_on_each_gpu(algorithm, plan):
    """Their headers name the options and the size."""
    recipe = ROOT / "recipes" / algorithm / "gsm8k_llama3_70b_lora.yaml"
    size, options = re.search(
        r"them on each GPU in 4 bits, (\d+) GiB by `lit-rlhf plan`: (.*)", recipe.read_text()
    ).groups()
    words = ["-c", recipe, "--model-config", MODELS / "llama3_70b.json", "--device-memory", 80]
    code, said, table = plan(*words, *options.split())
    assert code == 0, said
    assert "DDP over 8 devices" in said
    assert round(float(table["peak"]["this recipe"])) == int(size)


def test_no_weights_are_loaded_and_nothing_is_written(plan, monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    before = sorted(path for path in (ROOT / "recipes").rglob("*"))
    assert plan("-c", QUICKSTARTS[1])[0] == 0
    assert sorted(path for path in (ROOT / "recipes").rglob("*")) == before


def test_seventy_billion_parameters_on_eight_gpus(plan):
    recipe = ROOT / "recipes" / "grpo" / "gsm8k_qwen2.5_7b_lora.yaml"
    words = ["-c", recipe, "--model-config", MODELS / "llama3_70b.json", "--devices", 8, "--device-memory", 80]
    code, said, table = plan(*words)
    assert code == 1
    assert "70,553,706,496 parameters; DDP over 8 devices" in said
    assert "This recipe does NOT fit" in said
    assert re.search(r"-c recipes/trainer/fsdp2.yaml --model.rollout_weights sharded: \d+\.\d GiB, fits", said)
    assert table["fits"]["GRPO QLoRA"] == "yes"
    assert table["fits"]["GRPO full"] == "no"
    assert "peak with FSDP2" in table
    assert table["peak with FSDP2"]["GRPO QLoRA"] == "-"  # bitsandbytes' weights cannot be sharded
    gathered, sharded = (float(table[row]["GRPO LoRA"]) for row in ("peak with FSDP2", "and sharded rollouts"))
    assert sharded < 80 < gathered
    words += ["-c", ROOT / "recipes" / "trainer" / "fsdp2.yaml"]
    _, said, table = plan(*words)
    assert "FSDP2 over 8 devices\n" in said
    assert float(table["peak with sharded rollouts"]["this recipe"]) == sharded
    code, said, table = plan(*words, "--model.rollout_weights", "sharded")
    assert code == 0, said
    assert "FSDP2 over 8 devices, sharded in rollouts too" in said
    assert float(table["peak"]["this recipe"]) == sharded
    assert "peak with sharded rollouts" not in table


def test_more_devices_are_offered_before_training_less(plan):
    recipe = ROOT / "recipes" / "grpo" / "gsm8k_qwen2.5_0.5b.yaml"
    words = ["--model-config", MODELS / "qwen2.5_7b.json", "--devices", 8, "--device-memory", 80]
    code, said, _ = plan("-c", recipe, *words)
    assert code == 1
    lines = [line.strip() for line in said.partition("What to change")[2].splitlines()[1:]]
    assert [line.partition(":")[0] for line in lines] == [
        "--data.micro_batch_tokens 2048",
        "-c recipes/trainer/fsdp2.yaml",
        "--model.rollout_weights sharded",
    ]
    assert lines[2].endswith("GiB, fits")


def test_a_fragment_shards_what_it_shards(plan):
    words = ["--model-config", MODELS / "qwen2.5_7b.json", "--model.lora_rank", 0]
    recipe = ROOT / "recipes" / "grpo" / "gsm8k_qwen2.5_0.5b.yaml"
    alone = plan("-c", recipe, *words)[2]
    _, said, sharded = plan("-c", recipe, "-c", ROOT / "recipes" / "trainer" / "multinode.yaml", *words)
    assert "FSDP2 over 16 devices" in said
    assert float(sharded["weights"]["this recipe"]) == pytest.approx(
        float(alone["weights"]["this recipe"]) / 16, abs=0.1
    )
    assert "gathered weights" in sharded
    assert sharded["weights"]["GRPO QLoRA"] == alone["weights"]["GRPO QLoRA"]


def test_variants_differ_in_what_they_say():
    work = Workload(shape_of(AutoConfig.for_model(**json.loads((MODELS / "qwen2.5_7b.json").read_text()))))
    works = variants(replace(work, reference="copy"))
    assert list(works) == COLUMNS[1:]
    memories = {name: memory_of(value) for name, value in works.items()}
    for algorithm in ("GRPO", "PPO"):
        peaks = [memories[f"{algorithm} {way}"].peak for way in ("full", "LoRA", "QLoRA")]
        assert peaks == sorted(peaks, reverse=True)
    for way in ("full", "LoRA", "QLoRA"):
        assert memories[f"GRPO {way}"].peak < memories[f"PPO {way}"].peak
        assert memories[f"GRPO {way}"].critic == 0
    assert memories["GRPO full"].reference == memories["GRPO full"].weights
    assert memory_of(variants(replace(work, reference=None))["PPO full"]).reference == 0  # no KL penalty
    # From an adapter's recipe the same columns come out.
    low = replace(work, weight_bytes=2, compute_bytes=2, lora_rank=16, critic="adapter", quantization="4bit")
    assert {name: memory_of(value) for name, value in variants(low).items()} == memories


def test_each_change_is_one_that_the_recipe_can_take(llama_70b):
    work = Workload(llama_70b, reference="copy", critic="own", placement="ddp", devices=8)
    offered = list(changes(work))
    names = [name for name, _ in offered]
    assert names == [
        "--model.gradient_checkpointing true",
        "--data.micro_batch_tokens 2048",
        "max_rows: 64 of data.engine, a TransformersEngine",
        "-c recipes/trainer/fsdp2.yaml",
        "--model.rollout_weights sharded",
        "--model.lora_rank 16 --model.dtype bfloat16 --model.critic adapter",
        "--model.quantization 4bit --trainer.strategy ddp",  # FSDP2 cannot shard its weights
    ]
    *peaks, quantised = [memory_of(work).peak, *(memory_of(changed).peak for _, changed in offered)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-3] > quantised > peaks[-1]  # whole on each device, it is no smaller than an eighth in 16 bits
    alone = [name for name, _ in changes(replace(work, placement="one", devices=1))]
    assert "--model.quantization 4bit" in alone
    assert "-c recipes/trainer/fsdp2.yaml" not in alone


def test_the_fewest_devices(llama_70b):
    work = Workload(llama_70b, reference="copy", checkpointing=True, tokens=2048, rows=64, prompts=8)
    # Whole weights of policy and reference are gathered for a rollout: 526 GiB on each device.
    assert fewest_devices(work, 80 * GIB) is None
    assert fewest_devices(replace(work, sharded_rollouts=True), 80 * GIB) == 64
    devices = fewest_devices(work, 640 * GIB)
    assert devices is not None
    fits, fewer = (memory_of(replace(work, placement="fsdp2", devices=n)).peak for n in (devices, devices // 2))
    assert fits <= 640 * GIB < fewer


def test_errors_are_one_sentence(plan, tmp_path, policy_dir):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"model_type": "nothing"}')
    recipe = QUICKSTARTS[0]
    for words, expected in (
        (["-c", recipe, "--model-config", tmp_path / "broken.json"], "no configuration of a model"),
        (["-c", recipe, "--model-config", tmp_path / "other.json"], "no configuration of a model"),
        (["-c", recipe, "--model.policy", tmp_path / "nowhere"], "with --model-config FILE"),
        (["-c", ROOT / "recipes" / "quickstart" / "make_base.yaml"], "a policy module"),
    ):
        code, said, _ = plan(*words)
        assert code == 1
        assert expected in said
        assert len([line for line in said.splitlines() if "error" in line]) == 1
    assert plan("-c", recipe, "--devices", 0)[0] == 2
    assert plan()[0] == 2


def test_devices_of_a_recipe(plan, policy_dir):
    for words, expected in (
        (["--trainer.devices", 2], "DDP over 2 devices"),
        (["--trainer.devices", "[0,1,3]"], "DDP over 3 devices"),
        (["--trainer.devices", "auto"], "one device"),
        (["--trainer.devices", 2, "--trainer.num_nodes", 4], "DDP over 8 devices"),
        (["--trainer.devices", 2, "--devices", 16], "DDP over 16 devices"),
        (["--prompt-length", 33], "prompts up to 33 tokens (as given)"),
    ):
        assert expected in plan("-c", QUICKSTARTS[0], *words)[1], words


def test_vllm_beside_the_trainer_and_elsewhere(plan):
    recipe = ROOT / "recipes" / "grpo" / "gsm8k_qwen2.5_0.5b.yaml"
    words = ["-c", recipe, "--model-config", MODELS / "qwen2.5_0.5b.json", "--device-memory", 40]
    _, said, table = plan(*words, "-c", ROOT / "recipes" / "trainer" / "vllm.yaml")
    assert "sampled by vLLM on the same device, which takes 0.3 of its memory (gpu_memory_utilization)\n" in said
    assert table["vLLM"]["this recipe"] == "12.0"
    assert "KV cache" not in table
    _, said, table = plan(*words, "-c", ROOT / "recipes" / "trainer" / "vllm_servers.yaml")
    assert "sampled by servers elsewhere, whose memory is not counted\n" in said
    assert not {"vLLM", "KV cache"} & set(table)


def test_vllm_that_sleeps_is_a_way_to_fit(plan):
    words = ["-c", ROOT / "recipes" / "quickstart" / "grpo.yaml", "-c", ROOT / "recipes" / "trainer" / "vllm.yaml"]
    words += ["--trainer.accelerator", "gpu", "--model-config", MODELS / "qwen2.5_7b.json", "--device-memory", 80]
    code, said, _ = plan(*words)
    assert code == 1
    assert "\n  sleep: true of data.engine: " in said
    assert "TransformersEngine" not in said
