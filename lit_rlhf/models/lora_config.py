"""What a low-rank adapter looks like: peft's options, from a recipe or from the ``adapter_config.json`` of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rlhf.errors import ConfigurationError, check_number

_FILE = "adapter_config.json"

# Options of peft.LoraConfig with which switching the adapter off gives back the base.
_SUPPORTED = (
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "modules_to_save",
    "init_lora_weights",
    "fan_in_fan_out",
)
# Notes of a saved adapter, and settings of options that are not in use.
_NOTES = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_config",
    "megatron_core",
    "parent_library",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
)


def lora_options(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read and check the options of an adapter.

    Args:
        config: Options of ``peft.LoraConfig`` by name, or a file ``adapter_config.json``, or the folder it is in. The
            dropout that an adapter was trained with is left out: log-probs at rollout and in training are compared.

    Returns:
        Options of ``peft.LoraConfig``; ``r`` is among them.

    Raises:
        ConfigurationError: There is no such file, or it asks for what reinforcement learning cannot work with.
    """
    saved = isinstance(config, str | Path)
    where = str(config) if saved else "lora_config"
    given = read_adapter_config(config) if isinstance(config, str | Path) else dict(config)
    if given.pop("lora_dropout", 0.0) and not saved:
        raise ConfigurationError(
            "lora_config: lora_dropout must be 0, as every dropout: log-probs at rollout and in training are compared"
        )
    if given.get("peft_type", "LORA") != "LORA":
        raise ConfigurationError(f"{where}: a LoRA adapter is wanted, this is one of type {given['peft_type']}")
    if given.pop("bias", "none") != "none":
        raise ConfigurationError(f"{where}: bias must be 'none', any other trains the base, which is the reference")
    initial = given.get("init_lora_weights", True)
    if initial not in (True, "gaussian"):
        raise ConfigurationError(
            f"{where}: init_lora_weights must be true or 'gaussian', got {initial!r}, which starts from another model "
            "than the base, the reference"
        )
    # A saved configuration has every option of peft's, most of them off.
    foreign = [name for name, value in given.items() if name not in _SUPPORTED + _NOTES and (value or not saved)]
    if foreign:
        raise ConfigurationError(
            f"{where}: {', '.join(foreign)} cannot be used here; there are {', '.join(_SUPPORTED)}"
        )
    options = {"r": 8, **{name: given[name] for name in _SUPPORTED if given.get(name) is not None}}
    check_number(f"{where}: r", options["r"], minimum=1)
    return options


def read_adapter_config(place: str | Path) -> dict[str, Any]:
    """Content of an ``adapter_config.json``.

    Args:
        place: The file, or its folder.

    Raises:
        ConfigurationError: It is not there, or holds something else.
    """
    path = Path(place)
    file = path / _FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{place}: no adapter can be read there ({file}: {error.strerror})") from error
    except ValueError as error:
        raise ConfigurationError(f"{file}: no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file}: holds a {type(content).__name__}, not the options of an adapter")
    return content
