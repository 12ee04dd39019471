"""A recipe's module and data without its Trainer, for commands that train nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L

from lit_rlhf.cli import LitRLHFCLI
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.modules.base import PolicyModule
from lit_rlhf.rollout.datamodule import RolloutDataModule


@dataclass(frozen=True)
class Recipe:
    """What a recipe says.

    Attributes:
        module: Not set up: it knows tokenizer and configuration, no weights are loaded.
        data: Not set up either.
        trainer: The Trainer's options as they are written.
    """

    module: PolicyModule
    data: RolloutDataModule
    trainer: dict[str, Any]


def read_recipe(args: Sequence[str]) -> Recipe:
    """Build module and data of a recipe; the Trainer and what belongs to it are left out.

    So a recipe for eight GPUs can be read on a laptop, and nothing is written.

    Args:
        args: What would follow ``lit-rlhf fit``: ``-c recipe.yaml`` and overrides.

    Raises:
        ConfigurationError: The recipe is not one for rollouts, or an option is out of range.
    """
    with warnings.catch_warnings():
        # The words of this command line are not those that LightningCLI is to read.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        cli = _ReadingCLI(["fit", *args])
    module, data = cli.model, cli.datamodule
    if not isinstance(module, PolicyModule) or not isinstance(data, RolloutDataModule):
        raise ConfigurationError(
            f"the recipe has {type(module).__name__} and {type(data).__name__}; this command reads recipes with "
            "a policy module, such as GRPOModule, and a RolloutDataModule"
        )
    return Recipe(module, data, cli.trainer_options)


class _ReadingCLI(LitRLHFCLI):
    """Parses what ``fit`` parses, and stops there."""

    model: L.LightningModule
    datamodule: L.LightningDataModule

    def instantiate_classes(self) -> None:
        trainer = self.config.fit.pop("trainer", None)
        self.trainer_options: dict[str, Any] = {} if trainer is None else trainer.as_dict()
        built: Any = self.parser.instantiate(self.config).fit
        self.model, self.datamodule = built.model, built.data

    def after_instantiate_classes(self) -> None:
        """There is no Trainer, so there are no folders and checkpoints to look at."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass
