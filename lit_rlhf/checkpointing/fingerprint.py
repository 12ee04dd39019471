"""What makes two runs the same run: a short value for everything that decides what is learned."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from lit_rlhf.data.prompts import PromptDataset

# Options of a module that say where its parts are (their content is compared), what a checkpoint keeps anyway, or that
# change nothing of what is learned.
_NOT_COMPARED = {
    "adapter",
    "critic_lr",
    "critic_model",
    "gradient_checkpointing",
    "lr",
    "max_skipped_steps",
    "model",
    "policy",
}
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_SAMPLES = 16
_SAMPLE_BYTES = 2**16


def fingerprint(module: Any, data: Any, precision: str) -> dict[str, Any]:
    """Plain values by name, of a run that is set up; two runs with the same ones draw and learn the same.

    Args:
        module: With its options, tokenizer and configuration.
        data: A DataModule; ``fingerprint()`` gives its own share, if it has one.
        precision: The Trainer's.
    """
    values: dict[str, Any] = {
        "base model": model_identity(module.model_name, module.model_config),
        "tokenizer": tokenizer_identity(module.tokenizer),
        "precision": precision,
    }
    values.update({name: plain(value) for name, value in sorted(_options(module).items()) if name not in _NOT_COMPARED})
    for name in ("adapter", "critic_model"):
        place = getattr(module, name, None)
        if place is not None:
            values[name] = folder_identity(Path(place)) or str(place)
    if hasattr(data, "fingerprint"):
        values.update({name: plain(value) for name, value in data.fingerprint().items()})
    return values


def _options(module: Any) -> dict[str, Any]:
    """Every option of the module's class and of those it hands options on to, with the default where none was given."""
    options: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        if kind.__module__.startswith("lightning") or "__init__" not in vars(kind):
            continue
        for name, parameter in inspect.signature(vars(kind)["__init__"]).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                options[name] = parameter.default
    given = getattr(module, "hparams", {})
    return {name: given.get(name, default) for name, default in options.items()}


def model_identity(name: str, config: PretrainedConfig) -> str:
    """Of a folder the content of its weights, of a model of the Hub its commit.

    Args:
        name: Hub name or folder.
        config: Its configuration.
    """
    found = folder_identity(Path(name)) or getattr(config, "_commit_hash", None) or name
    return f"{found}-{_digest([_stable(_architecture(config))])}"


def folder_identity(folder: Path) -> str | None:
    """A hash of the weight files in a folder; ``None`` where there are none.

    Of large files sixteen places are read, spread evenly: training moves every weight, so another model differs there.

    Args:
        folder: Of a model.
    """
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)}) if folder.is_dir() else []
    if not files:
        return None
    parts: list[str | bytes] = []
    for file in files:
        parts += [file.name, *_samples(file)]
    return _digest(parts)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of vocabulary, rules, special tokens and chat template.

    Args:
        tokenizer: Any of transformers'.
    """
    rules: Any = tokenizer.get_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):  # of the last call, not of the tokenizer
            rules.pop(setting, None)
    return _digest([_stable([rules, tokenizer.special_tokens_map, tokenizer.chat_template])])


def prompts_identity(prompts: PromptDataset) -> str:
    """A hash of all prompts and of what the reward functions get with them, in order.

    Args:
        prompts: Of one split.
    """
    return _digest(_stable([prompt.index, prompt.ids, prompt.columns]) for prompt in prompts.prompts)


def plain(value: Any) -> Any:
    """A value that a checkpoint keeps and ``==`` compares: what is neither text nor number becomes text.

    Args:
        value: Any.

    >>> plain((0.9, 0.95)), plain({"b": 1}), plain(len)
    ([0.9, 0.95], '{"b": 1}', 'len')
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return _stable(value) if isinstance(value, dict) else _named(value)


def _named(value: Any) -> str:
    """Without an address in memory, which would differ in each process."""
    return getattr(value, "__name__", None) or type(value).__name__


def _stable(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_named)


def _architecture(config: PretrainedConfig) -> dict[str, Any]:
    content = config.to_dict()
    return {name: value for name, value in content.items() if name not in ("transformers_version", "_name_or_path")}


def _samples(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as stream:
        for number in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            yield stream.read(_SAMPLE_BYTES)


def _digest(parts: Iterable[str | bytes]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()
