"""``lit-rlhf plan``: what a recipe takes of each device's memory, before a device is rented."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lit_rlhf.commands.parsing import command_parser, parse_beside_recipe
from lit_rlhf.commands.plan_choices import ADAPTER, RANK, changes, fewest_devices, variants
from lit_rlhf.commands.recipe import Recipe, read_recipe
from lit_rlhf.errors import ConfigurationError, LitRLHFError
from lit_rlhf.models.loading import load_config
from lit_rlhf.models.memory import GIB, memory_of
from lit_rlhf.models.shape import shape_of
from lit_rlhf.models.workload import Placement, Workload
from lit_rlhf.rollout.memory import workload

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DESCRIPTION = """Reckon what each device's memory has to hold: for the recipe, and beside it for GRPO and PPO with all
weights, with a low-rank adapter (LoRA), and with one on a 4-bit base (QLoRA). From shapes alone: no weights are
loaded. With --device-memory the exit code is 1 if the recipe does not fit."""
_EPILOG = """  lit-rlhf plan -c recipe.yaml
  lit-rlhf plan -c recipe.yaml -c recipes/trainer/fsdp2.yaml --devices 8 --device-memory 80
  lit-rlhf plan -c recipe.yaml --model-config config.json    # a model that is not on this machine"""
# The driver, kernels and what lies idle between allocations.
_USABLE = 0.92
_ASSUMED_PROMPT = 512
_PHASES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "always",
        (
            ("weights", "weights"),
            ("reference", "reference"),
            ("critic", "critic"),
            ("reward model", "reward_model"),
            ("gradients", "gradients"),
            ("optimizer moments", "optimizer"),
            ("vLLM", "engine"),
        ),
    ),
    (
        "training",
        (("activations", "activations"), ("vocabulary tiles", "vocabulary"), ("gathered weights", "gathered")),
    ),
    (
        "rollout",
        (
            ("KV cache", "cache"),
            ("sampling", "sampling"),
            ("gathered weights", "gathered_rollout"),
            ("vLLM", "engine_rollout"),
        ),
    ),
)


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: What follows ``lit-rlhf plan``.

    Raises:
        ConfigurationError: The recipe cannot be read, or its model's configuration is not here.
        SystemExit: With code 1 where the recipe does not fit.
    """
    parser = command_parser("plan", _DESCRIPTION, _EPILOG)
    parser.add_argument("--devices", type=int, help="devices of all machines (default: the recipe's)")
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="of each device: say whether it fits")
    parser.add_argument("--model-config", metavar="MODEL", help="file, folder or Hub name of another configuration")
    parser.add_argument("--prompt-length", type=int, help="tokens of the longest prompt (default: the recipe's)")
    options, rest = parse_beside_recipe(parser, args)
    for name in ("devices", "device_memory", "prompt_length"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    recipe = read_recipe(rest)
    config = _config(recipe, options.model_config)
    prompt_length, source = _prompt_length(recipe, options.prompt_length)
    trainer = recipe.trainer
    devices = options.devices or _devices(trainer)
    work = workload(
        recipe.module,
        recipe.data,
        prompt_length,
        shape=shape_of(config),
        placement=_placement(trainer),
        devices=devices,
        precision=str(trainer.get("precision") or "32-true"),
        cpu=trainer.get("accelerator") == "cpu",
    )
    if options.device_memory is not None:
        work = replace(work, device_bytes=round(options.device_memory * GIB))
    name = options.model_config or recipe.module.model_name
    console = Console(highlight=False, markup=False)
    for line in _heading(work, name, source):
        console.print(line, soft_wrap=True)
    budget = None if options.device_memory is None else options.device_memory * GIB * _USABLE
    console.print(_table({"this recipe": work, **variants(work)}, budget))
    console.print(
        f"Full: float32 weights; LoRA: rank {work.lora_rank or RANK}, bfloat16 base; QLoRA: the same in 4 bits, never "
        "sharded. PPO's critic has a backbone of its own, with an adapter a second one.",
        soft_wrap=True,
    )
    if budget is None:
        return
    console.print(_verdict(work, budget, options.device_memory), soft_wrap=True)
    if memory_of(work).peak > budget:
        for line in _advice(work, budget):
            console.print(f"  {line}", soft_wrap=True)
        raise SystemExit(1)


def _advice(work: Workload, budget: float) -> Iterator[str]:
    """Changes that help, until it fits; and more devices, if all weights are to be trained."""
    smallest, best = work, memory_of(work).peak
    for change, changed in changes(work):
        if change.startswith(ADAPTER):
            yield _more_devices(smallest, budget)
        peak = memory_of(changed).peak
        if peak < best:
            yield f"{change}: {_size(peak)}{', fits' if peak <= budget else ''}"
            smallest, best = changed, peak
        if peak <= budget:
            return
    if smallest.quantization is None:
        yield _more_devices(smallest, budget)


def _more_devices(work: Workload, budget: float) -> str:
    devices = fewest_devices(work, budget)
    if devices is not None:
        return f"instead: {devices} devices with -c recipes/trainer/fsdp2.yaml, fits"
    gathered = _size(memory_of(replace(work, placement="fsdp2")).gathered_rollout)
    return f"(more devices alone do not help: FSDP2 gathers {gathered} of weights on each for a rollout)"


def _verdict(work: Workload, budget: float, device_memory: float) -> str:
    peak = memory_of(work).peak
    usable = f"{_size(budget)} of {device_memory:g} GiB can be used"
    if peak <= budget:
        return f"This recipe fits: {_size(peak)}, and {usable}."
    return f"This recipe does NOT fit: {_size(peak)}, and {usable}. What to change, each on top of the others:"


def _heading(work: Workload, name: str, source: str) -> Iterator[str]:
    how = {
        "one": "one device",
        "ddp": f"DDP over {work.devices} devices",
        "fsdp2": f"FSDP2 over {work.devices} devices" + ", sharded in rollouts too" * work.sharded_rollouts,
    }
    yield f"{name}: {work.shape.parameters:,} parameters; {how[work.placement]}"
    again = ", activations recomputed" if work.checkpointing else ""
    yield (
        f"training: up to {work.tokens:,} tokens at once{again}; rollout: {work.rows:,} completions at once, prompts "
        f"up to {work.prompt_length:,} tokens ({source}), completions up to {work.new_tokens:,}"
    )
    if work.sampler == "servers":
        yield "sampled by servers elsewhere, whose memory is not counted"
    elif work.sampler == "vllm":
        least = "" if work.device_bytes else ", at least what stands below"
        share = (
            "" if work.cpu else f", which takes {work.sampler_share:g} of its memory (gpu_memory_utilization){least}"
        )
        yield f"sampled by vLLM on the same device{share}" + " and sleeps between rollouts" * work.sampler_sleeps


def _table(works: Mapping[str, Workload], budget: float | None) -> Table:
    memories = {name: memory_of(work) for name, work in works.items()}
    unit, word = (GIB, "GiB") if max(memory.peak for memory in memories.values()) >= GIB else (2**20, "MiB")
    table = Table(title=f"{word} on each device", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in memories:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)

    def row(title: str, values: Sequence[float], **style: Any) -> None:
        table.add_row(title, *(_cell(value / unit) for value in values), **style)

    for phase, parts in _PHASES:
        for title, part in parts:
            values = [getattr(memory, part) for memory in memories.values()]
            if any(values):
                row(title, values)
        if phase == "always":
            table.add_section()
        else:
            total = [getattr(memory, phase) for memory in memories.values()]
            row(f"peak of {phase}", total, style="bold", end_section=True)
    row("peak", [memory.peak for memory in memories.values()], style="bold")
    if budget is not None:
        table.add_row("fits", *("yes" if memory.peak <= budget else "no" for memory in memories.values()))
    recipe = next(iter(works.values()))
    if recipe.devices > 1 and recipe.placement != "fsdp2":
        table.add_row("peak with FSDP2", *(_sharded_peak(work, unit, False) for work in works.values()))
        table.add_row("and sharded rollouts", *(_sharded_peak(work, unit, True) for work in works.values()))
    elif recipe.placement == "fsdp2" and not recipe.sharded_rollouts and recipe.devices > 1:
        table.add_row("peak with sharded rollouts", *(_sharded_peak(work, unit, True) for work in works.values()))
    return table


def _sharded_peak(work: Workload, unit: int, sharded_rollouts: bool) -> str:
    if work.quantization is not None:
        return "-"
    return _cell(memory_of(replace(work, placement="fsdp2", sharded_rollouts=sharded_rollouts)).peak / unit)


def _cell(value: float) -> str:
    return "-" if value == 0 else f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.05 else "<0.1"


def _size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def _config(recipe: Recipe, given: str | None) -> PretrainedConfig:
    """The model's configuration, from a file where one is named."""
    if given is not None and Path(given).is_file():
        from transformers import AutoConfig

        try:
            content = json.loads(Path(given).read_text(encoding="utf-8"))
            return AutoConfig.for_model(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"--model-config {given}: no configuration of a model ({error})") from error
    try:
        return recipe.module.model_config if given is None else load_config(given)
    except ConfigurationError as error:
        hint = " Give its config.json with --model-config FILE" if given is None else ""
        raise ConfigurationError(f"{error}.{hint}") from error


def _prompt_length(recipe: Recipe, given: int | None) -> tuple[int, str]:
    """Tokens of the longest prompt, and how that is known."""
    if given is not None:
        return given, "as given"
    if recipe.data.max_prompt_length is not None:
        return recipe.data.max_prompt_length, "max_prompt_length"
    if recipe.data.sources["train"] is not None:
        with suppress(LitRLHFError):
            prompts = recipe.data.read_prompts("train", recipe.module.tokenizer)
            if len(prompts):
                return prompts.longest, "the longest in the file"
    return _ASSUMED_PROMPT, "assumed: name it with --prompt-length"


def _devices(trainer: Mapping[str, Any]) -> int:
    """Of all nodes; what the machine decides counts as one."""
    devices = trainer.get("devices")
    if isinstance(devices, list):
        each = len(devices)
    elif isinstance(devices, str) and "," in devices:
        each = len([part for part in devices.split(",") if part.strip()])
    else:
        each = int(str(devices)) if str(devices).isdigit() else 1
    return max(1, each) * int(trainer.get("num_nodes") or 1)


def _placement(trainer: Mapping[str, Any]) -> Placement:
    """Sharded, or else replicated as Lightning does by default; on a single device neither."""
    strategy = trainer.get("strategy")
    name = str(strategy.get("class_path") if isinstance(strategy, Mapping) else strategy).lower()
    return "fsdp2" if "modelparallel" in name or "fsdp" in name else "ddp"
