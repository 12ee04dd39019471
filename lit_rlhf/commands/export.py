"""``lit-rlhf export``: the policy of a checkpoint as a Hugging Face folder, or its adapter as one of peft's."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_rlhf.checkpointing import atomic_folder, read_content, read_weights, summary_of
from lit_rlhf.checkpointing.fingerprint import model_identity
from lit_rlhf.commands.model_card import model_card
from lit_rlhf.commands.parsing import command_parser
from lit_rlhf.commands.restoring import RestoredPolicy, restore_policy
from lit_rlhf.errors import CheckpointError, ConfigurationError, OutputError
from lit_rlhf.models.loading import load_config, load_tokenizer
from lit_rlhf.modules.pretrained import DTYPES

_DESCRIPTION = """Write the policy of a checkpoint as a Hugging Face folder: weights as safetensors, tokenizer with chat
template, generation config and a model card. Of a run with a low-rank adapter the adapter is written as peft
has it, or, with --merge, the base with the adapter merged into it. The checkpoint may be a file or a folder of
shards, by any strategy; everything happens on the CPU."""
_EPILOG = """  lit-rlhf export --ckpt_path checkpoints/runs/x/last.ckpt --out my-policy
  lit-rlhf export --ckpt_path checkpoints/runs/x/last.ckpt --out my-policy --merge --dtype bfloat16"""
# One of them in a folder makes it a model's, which --overwrite may replace.
_MODEL_FILES = ("config.json", "adapter_config.json")


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: What follows ``lit-rlhf export``.

    Raises:
        CheckpointError: The checkpoint cannot be read, or holds no policy.
        ConfigurationError: Its base model is not here, or is another one; or an option does not fit.
        OutputError: The folder is not empty, or cannot be written.
    """
    parser = command_parser("export", _DESCRIPTION, _EPILOG)
    parser.add_argument("--ckpt_path", required=True, help="a checkpoint's file, or its folder of shards")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write; must be empty")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base, in full precision")
    parser.add_argument("--base", metavar="MODEL", help="where the run's base model is now, if it was moved")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: as they were trained)")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file of weights (default: 5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace the model folder that is in DIR's place")
    options = parser.parse_args(args)
    if not re.fullmatch(r"\d+[KMGT]i?B", options.max_shard_size):
        parser.error(f"--max_shard_size is written 5GB or 500MB, got {options.max_shard_size!r}")
    check_target(options.out, options.overwrite, keep=[options.ckpt_path, options.base])
    content = read_content(options.ckpt_path)
    hparams = dict(content.get("hyper_parameters", {}))
    if "policy" not in hparams:
        module = summary_of(content).get("module", "module of another kind")
        raise CheckpointError(f"{options.ckpt_path}: of a {module}, and no policy; fit exports such a model at its end")
    check_target(options.out, options.overwrite, keep=[hparams["policy"]])
    base = _base(options.base or str(hparams["policy"]), content, options.base is None)
    with _quiet():
        weights = read_weights(options.ckpt_path, content, "policy.")
        policy = restore_policy({**hparams, "policy": base}, weights, options.merge, DTYPES.get(options.dtype))
        if options.merge and policy.adapter_rank == 0:
            raise ConfigurationError(f"--merge: {options.ckpt_path} has no adapter, leave it out")
        card = model_card(content, policy, str(hparams["policy"]), options.ckpt_path)
        _write(options.out.resolve(), policy, base, card, options.max_shard_size, options.overwrite)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{policy.kind} of {options.ckpt_path} written to {options.out}")


def check_target(folder: Path, overwrite: bool, keep: Sequence[str | None] = ()) -> None:
    """Refuse a folder that holds something.

    Args:
        folder: To be written.
        overwrite: A model may be replaced.
        keep: Files and folders that are read, and must not be replaced.

    Raises:
        OutputError: Saying what is there.
    """
    target = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--out {folder}: this is a file")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise OutputError(f"--out {folder}: the folder is not empty; name another, or add --overwrite")
    if not any((folder / name).exists() for name in _MODEL_FILES):
        raise OutputError(f"--out {folder}: --overwrite replaces models only, and this folder holds something else")
    for path in filter(None, keep):
        source = Path(path).resolve()
        if source == target or target in source.parents:
            raise OutputError(f"--out {folder}: {path} is in it, which is needed; name another folder")


def _base(name: str, content: dict[str, Any], from_checkpoint: bool) -> str:
    """The base model's name, if it is there and the one that was trained."""
    try:
        config = load_config(name)
    except ConfigurationError as error:
        hint = "; if it was moved, name its place with --base" if from_checkpoint else ""
        raise ConfigurationError(f"{error}{hint}") from error
    trained = summary_of(content).get("run", {}).get("base model")
    adapted = any(content["hyper_parameters"].get(option) for option in ("lora_rank", "lora_config", "adapter"))
    if adapted and trained is not None and trained != model_identity(name, config):
        raise ConfigurationError(f"{name}: the base model has changed since this checkpoint was trained on it")
    return name


def _write(out: Path, policy: RestoredPolicy, base: str, card: str, max_shard_size: str, overwrite: bool) -> None:
    replaced = out.with_name(f"{out.name}.replaced-{os.getpid()}")
    try:
        with atomic_folder(out) as folder:
            policy.save(folder, max_shard_size)
            load_tokenizer(base).save_pretrained(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if overwrite and out.exists():
                out.rename(replaced)
    except BaseException:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
