"""``lit-rlhf``: a LightningCLI over this library's modules. Nothing else lives here."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Imported so that recipes may name classes without their module.
from lit_rlhf.callbacks import GracefulStop, RolloutCallback  # noqa: F401
from lit_rlhf.checkpointing import check_folders, find_last, output_folders, read_summary
from lit_rlhf.commands import find_command
from lit_rlhf.data.preferences import PreferenceDataModule  # noqa: F401
from lit_rlhf.data.supervised import SupervisedDataModule  # noqa: F401
from lit_rlhf.errors import ConfigurationError, LitRLHFError, UsageError
from lit_rlhf.modules.grpo import GRPOModule  # noqa: F401
from lit_rlhf.modules.ppo import PPOModule  # noqa: F401
from lit_rlhf.modules.reward_model import RewardModelModule  # noqa: F401
from lit_rlhf.modules.sft import SFTModule  # noqa: F401
from lit_rlhf.rollout.datamodule import RolloutDataModule  # noqa: F401
from lit_rlhf.usage import OneLineParser, check_nulls, check_recipes, explain

_DESCRIPTION = """PPO and GRPO post-training of language models with PyTorch Lightning.

A recipe holds everything:       lit-rlhf fit -c recipes/quickstart/grpo.yaml
Any value can be overridden:     lit-rlhf fit -c recipe.yaml --model.init_args.lr 1e-6
Fragments are layered:           lit-rlhf fit -c recipe.yaml -c recipes/trainer/ddp.yaml
Continue a run:                  lit-rlhf fit -c recipe.yaml --ckpt_path last
See the resolved recipe:         lit-rlhf fit -c recipe.yaml --print_config
Options of a class:              lit-rlhf fit --model.help GRPOModule
                                 lit-rlhf fit --data.help RolloutDataModule
Look at the prompts first:       lit-rlhf data check -c recipe.yaml
Look at the rewards first:       lit-rlhf rewards try -c recipe.yaml
Reckon the memory first:         lit-rlhf plan -c recipe.yaml
Make a model of a checkpoint:    lit-rlhf export --ckpt_path last.ckpt --out my-policy

Errors are one sentence; --traceback shows where they were raised.
Put -c before the options that override it: what comes later wins."""


class LitRLHFCLI(LightningCLI):
    """A LightningCLI whose subcommands are fit, validate, test and predict."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            model_class=L.LightningModule,
            datamodule_class=L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"description": _DESCRIPTION},
            parser_class=OneLineParser,
            args=args,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Keep the description's lines as they are written."""
        parser = super().init_parser(**kwargs)
        parser.description = _DESCRIPTION
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What Lightning does not have."""
        parser.add_argument("--traceback", action="store_true", help="Show where an error was raised.")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Look at the recipes first: the parser's errors would not name them."""
        check_recipes(_words(args))
        super().parse_arguments(parser, args)
        config = self.config.get(self.config.get("subcommand")) or {}
        for key in ("model", "data"):
            if config.get(key) is not None:
                check_nulls(key, config[key])

    def _parse_ckpt_path(self) -> None:
        """Not here: a checkpoint's hyperparameters would silently win over the recipe and the command line."""

    def after_instantiate_classes(self) -> None:
        """Look at the output folders and the checkpoint before loggers write and models are loaded."""
        if self.subcommand == "fit":
            check_folders(output_folders(self.trainer))
        options = self.config_init[self.subcommand]
        path = options.get("ckpt_path")
        if path is None or path == "best" or "://" in str(path):
            return
        path = find_last(self.trainer) if path == "last" else path
        read_summary(path)
        # Known to the Trainer from here on: the module's ResumeGuard compares it before any weights are loaded.
        self.trainer.ckpt_path = path
        options["ckpt_path"] = None

    def after_fit(self) -> None:
        """A run that a signal ended is not a success, whatever comes after it in a script."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GracefulStop) and callback.received and self.trainer.is_global_zero:
                raise SystemExit(128 + callback.received)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Lightning checks the Trainer's options against each other and against the machine."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
            if _cause_of_ours(error) is not None:
                raise
            raise ConfigurationError(f"trainer: {' '.join(str(error).split())}") from error

    def instantiate_classes(self) -> None:
        """Make the objects; what their constructors refuse is an error of the user's making."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, OSError, MisconfigurationException) as error:
            if _cause_of_ours(error) is not None:
                raise
            raise ConfigurationError(explain(str(error))) from error


def main(args: ArgsType = None) -> None:
    """Run ``lit-rlhf``; errors of the user's making end in one message instead of a traceback.

    Args:
        args: Command line; that of the process by default.
    """
    words = _words(args)
    command = find_command([word for word in words if word != "--traceback"])
    try:
        if command is not None:
            command()
        else:
            LitRLHFCLI(args)
    except Exception as error:
        message = _message(error)
        if message is None or "--traceback" in words:
            raise
        print(f"lit-rlhf: error: {message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None


def _words(args: ArgsType) -> list[str]:
    given = sys.argv[1:] if args is None else args
    return given if isinstance(given, list) else []


def _message(error: Exception) -> str | None:
    """What to tell the user; ``None`` for a bug, which keeps its traceback."""
    ours = _cause_of_ours(error)
    if ours is not None:
        return str(ours)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MisconfigurationException | ValueError | RuntimeError) and _raised_by_lightning(error):
        return " ".join(str(error).split())
    return None


def _raised_by_lightning(error: Exception) -> bool:
    """Whether Lightning itself complains, not something that it called."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("lightning.")


def _cause_of_ours(error: BaseException | None) -> LitRLHFError | None:
    """The error itself, or what jsonargparse wraps when a constructor raises."""
    while error is not None and not isinstance(error, LitRLHFError):
        error = error.__cause__
    return error


if __name__ == "__main__":
    main()
