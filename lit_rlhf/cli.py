"""``lit-rlhf``: a LightningCLI over this library's modules. Nothing else lives here."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# Imported so that recipes may name classes without their module.
from lit_rlhf.callbacks import RolloutCallback  # noqa: F401
from lit_rlhf.commands import find_command
from lit_rlhf.data.preferences import PreferenceDataModule  # noqa: F401
from lit_rlhf.data.supervised import SupervisedDataModule  # noqa: F401
from lit_rlhf.errors import LitRLHFError
from lit_rlhf.modules.grpo import GRPOModule  # noqa: F401
from lit_rlhf.modules.ppo import PPOModule  # noqa: F401
from lit_rlhf.modules.reward_model import RewardModelModule  # noqa: F401
from lit_rlhf.modules.sft import SFTModule  # noqa: F401
from lit_rlhf.rollout.datamodule import RolloutDataModule  # noqa: F401

_DESCRIPTION = """PPO and GRPO post-training of language models with PyTorch Lightning.

A recipe holds everything:       lit-rlhf fit -c recipes/quickstart/grpo.yaml
Any value can be overridden:     lit-rlhf fit -c recipe.yaml --model.init_args.lr 1e-6
Fragments are layered:           lit-rlhf fit -c recipe.yaml -c recipes/trainer/ddp.yaml
Continue a run:                  lit-rlhf fit -c recipe.yaml --ckpt_path path/to/last.ckpt
See the resolved recipe:         lit-rlhf fit -c recipe.yaml --print_config
Options of a class:              lit-rlhf fit --model.help GRPOModule
                                 lit-rlhf fit --data.help RolloutDataModule
Look at the prompts first:       lit-rlhf data check -c recipe.yaml
Look at the rewards first:       lit-rlhf rewards try -c recipe.yaml

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
            args=args,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Keep the description's lines as they are written."""
        parser = super().init_parser(**kwargs)
        parser.description = _DESCRIPTION
        return parser


def main(args: ArgsType = None) -> None:
    """Run ``lit-rlhf``; errors of the user's making end in one message instead of a traceback.

    Args:
        args: Command line; that of the process by default.
    """
    words = sys.argv[1:] if args is None else args
    command = find_command(words) if isinstance(words, list) else None
    try:
        if command is not None:
            command()
        else:
            LitRLHFCLI(args)
    except Exception as error:
        ours: BaseException | None = _cause_of_ours(error)
        if isinstance(error, FileNotFoundError) and "heckpoint" in str(error):
            ours = error
        if ours is None:
            raise
        print(f"lit-rlhf: error: {ours}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None


def _cause_of_ours(error: BaseException | None) -> LitRLHFError | None:
    """The error itself, or what jsonargparse wraps when a constructor raises."""
    while error is not None and not isinstance(error, LitRLHFError):
        error = error.__cause__
    return error


if __name__ == "__main__":
    main()
