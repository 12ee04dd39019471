"""PPO and GRPO post-training of language models as PyTorch Lightning modules.

Public names are imported on first use, so ``import lit_rlhf`` pulls in neither transformers nor bitsandbytes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rlhf.data.preferences import PreferenceDataModule
    from lit_rlhf.data.supervised import SupervisedDataModule
    from lit_rlhf.modules.grpo import GRPOModule
    from lit_rlhf.modules.ppo import PPOModule
    from lit_rlhf.modules.reward_model import RewardModelModule
    from lit_rlhf.modules.sft import SFTModule
    from lit_rlhf.rollout.batch import RolloutBatch
    from lit_rlhf.rollout.datamodule import RolloutDataModule

__version__ = "0.1.0"

_EXPORTS = {
    "GRPOModule": "lit_rlhf.modules.grpo",
    "PPOModule": "lit_rlhf.modules.ppo",
    "PreferenceDataModule": "lit_rlhf.data.preferences",
    "RewardModelModule": "lit_rlhf.modules.reward_model",
    "RolloutBatch": "lit_rlhf.rollout.batch",
    "RolloutDataModule": "lit_rlhf.rollout.datamodule",
    "SFTModule": "lit_rlhf.modules.sft",
    "SupervisedDataModule": "lit_rlhf.data.supervised",
}

__all__ = [
    "GRPOModule",
    "PPOModule",
    "PreferenceDataModule",
    "RewardModelModule",
    "RolloutBatch",
    "RolloutDataModule",
    "SFTModule",
    "SupervisedDataModule",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'lit_rlhf' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
