"""The README.md of an exported policy: what it is and how it was trained, from the checkpoint alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_rlhf import __version__
from lit_rlhf.checkpointing import summary_of
from lit_rlhf.commands.restoring import RestoredPolicy

# Of the run's own record: what its other rows say, or what is of use to the machine alone.
_SAID = {"base model", "tokenizer", "rewards", "training prompts", "policy", "quantization"}
# Not in it: a continued run keeps the rates of its checkpoint whatever the recipe says.
_NOT_IN_RUN = ("lr", "critic_lr")
FOLDER = "path/to/this/folder"
_LOADING = {
    True: """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

policy = AutoPeftModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)""",
    False: """from transformers import AutoModelForCausalLM, AutoTokenizer

policy = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)""",
}


def model_card(content: Mapping[str, Any], policy: RestoredPolicy, base: str, source: str) -> str:
    """Markdown with the header that the Hugging Face Hub reads.

    Args:
        content: Of the checkpoint.
        policy: What is exported.
        base: The model that training started from, as the run names it.
        source: The checkpoint's path.
    """
    summary = summary_of(dict(content))
    run: dict[str, Any] = summary.get("run", {})
    algorithm = str(summary.get("module", "lit_rlhf")).removesuffix("Module")
    title = f"# {Path(base).name}, trained with {algorithm}"
    loading = ["```python", f'folder = "{FOLDER}"', _LOADING[policy.adapter], "```"]
    lines = [*_header(policy, base), title, "", f"{policy.kind} from `{base}`.", "", *loading]
    lines += ["", "## Training", "", *_table(_facts(content, policy, run, algorithm, source))]
    tables = {"Held-out metrics": dict(_metrics(content)), "Options": _options(content, run)}
    for name, rows in tables.items():
        if rows:
            lines += ["", f"## {name}", "", *_table(rows)]
    return "\n".join(lines) + "\n"


def _options(content: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen; options that are off are left out."""
    options = {name: value for name, value in run.items() if name not in _SAID}
    given = content.get("hyper_parameters", {})
    options.update({name: given[name] for name in _NOT_IN_RUN if name in given})
    return {name: options[name] for name in sorted(options) if options[name] not in (None, [], "")}


def _header(policy: RestoredPolicy, base: str) -> Iterator[str]:
    yield "---"
    if not Path(base).exists():  # a name on the Hub, which links it
        yield f"base_model: {base}"
    yield f"library_name: {'peft' if policy.adapter else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield "tags: [lit_rlhf, reinforcement-learning]"
    yield "---"
    yield ""


def _facts(
    content: Mapping[str, Any], policy: RestoredPolicy, run: Mapping[str, Any], algorithm: str, source: str
) -> dict[str, Any]:
    iterations = content.get("RolloutDataModule", {}).get("iteration")
    tokens = content.get("callbacks", {}).get("Throughput", {}).get("tokens", {})
    facts = {
        "algorithm": algorithm,
        "iterations": iterations,
        "optimizer steps": content.get("global_step"),
        "prompts": run.get("training prompts"),
        "rewards, with weights": run.get("rewards"),
        "tokens generated": _count(tokens.get("generated")),
        "tokens trained on": _count(tokens.get("trained")),
        "weights": f"{policy.num_parameters:,} parameters, {policy.dtype}",
        "base in training": run.get("quantization"),
        "checkpoint": Path(source).name,
        "lit_rlhf": __version__,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _metrics(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The last validation's, and what checkpoints were chosen by."""
    held_out = content.get("lit_rlhf", {}).get("held_out") or {}
    values = held_out.get("metrics", {})
    for name, value in values.items():
        if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in values:
            continue
        ends = [values[f"{name}_{end}"] for end in ("low", "high") if f"{name}_{end}" in values]
        interval = f", {ends[0]:.4g} to {ends[1]:.4g}" if len(ends) == 2 else ""
        yield name, f"{value:.4g}{interval} (after step {held_out['step']})"
    for state in content.get("callbacks", {}).values():
        score = state.get("best_model_score") if isinstance(state, dict) else None
        if score is not None and math.isfinite(float(score)):
            yield f"{state['monitor']}, best of the run", f"{float(score):.4g}"


def _table(rows: Mapping[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())]


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _count(number: float | None) -> str | None:
    return None if number is None else f"{number:,.0f}"
