"""A low-rank adapter that vLLM applies itself, so that a rollout costs handing over the adapter alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.lora import POLICY_ADAPTER
from lit_rlhf.strategies import whole

# The ranks for which vLLM reserves room.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_UNKNOWN_TO_VLLM = ("use_dora", "modules_to_save", "trainable_token_indices")


def adapter_room(policy: nn.Module) -> int:
    """The rank for which vLLM has to reserve room (its ``max_lora_rank``).

    Args:
        policy: A peft model.

    Raises:
        ConfigurationError: vLLM has no such adapters.
    """
    config: Any = policy.peft_config[POLICY_ADAPTER]  # type: ignore[index]
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    odd = [name for name in _UNKNOWN_TO_VLLM if getattr(config, name, None)]
    if odd or rank > _RANKS[-1]:
        raise ConfigurationError(
            f"lora='adapter': vLLM has no adapters with {odd[0] if odd else f'a rank of {rank}'}; use lora='merged'"
        )
    return min(room for room in _RANKS if room >= rank)


def adapter_weights(policy: nn.Module) -> dict[str, Tensor]:
    """Weights of the policy's adapter, as peft names them in a file.

    Args:
        policy: A peft model. Sharded weights are gathered; all processes have to ask.
    """
    from peft.utils.save_and_load import get_peft_model_state_dict

    found = get_peft_model_state_dict(policy, adapter_name=POLICY_ADAPTER)
    return {name: whole(weight).detach() for name, weight in found.items()}


def write_adapter(policy: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the policy's adapter as peft does.

    Args:
        policy: A peft model.
        weights: Of :func:`adapter_weights`.
        folder: Is made.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    file = folder / "adapter_model.safetensors"
    save_file({name: weight.contiguous().cpu() for name, weight in weights.items()}, file)
    policy.peft_config[POLICY_ADAPTER].save_pretrained(folder)  # type: ignore[index, union-attr]
