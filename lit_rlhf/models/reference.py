"""The frozen reference policy: moved and sharded with its module, never trained, never written to a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class FrozenReference(nn.Module):
    """A frozen copy of a model as it is now.

    It stays in evaluation mode whatever its parent does, and has no entry in ``state_dict``: it can be rebuilt from
    where the policy came from.

    Args:
        policy: The model to copy.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(policy).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> FrozenReference:
        """Stay in evaluation mode."""
        return super().train(False)

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """Nothing to save."""
        return {} if destination is None else destination


def forget_missing_reference(module: nn.Module, incompatible_keys: Any) -> None:
    """Post-hook of ``load_state_dict``: a checkpoint without the reference's weights is complete.

    Args:
        module: The module that holds the reference.
        incompatible_keys: What ``load_state_dict`` found missing; edited in place, as torch wants it.
    """
    references = [name for name, child in module.named_modules() if isinstance(child, FrozenReference)]
    incompatible_keys.missing_keys[:] = [
        key for key in incompatible_keys.missing_keys if not any(key.startswith(f"{name}.") for name in references)
    ]
