"""Rewards: functions that score completions, and how they are called and combined.

Names are imported on first use, so that ``import lit_rlhf.rewards`` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rlhf.rewards.combine import RewardScorer, RewardScores
    from lit_rlhf.rewards.math import MathAnswer
    from lit_rlhf.rewards.protocol import RewardFunction, call_reward
    from lit_rlhf.rewards.reward_model import RewardModel
    from lit_rlhf.rewards.text import ExactMatch, FormatMatch, ThinkFormat

_MODULES = {
    "ExactMatch": "text",
    "FormatMatch": "text",
    "MathAnswer": "math",
    "RewardFunction": "protocol",
    "RewardModel": "reward_model",
    "RewardScorer": "combine",
    "RewardScores": "combine",
    "ThinkFormat": "text",
    "call_reward": "protocol",
}

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "MathAnswer",
    "RewardFunction",
    "RewardModel",
    "RewardScorer",
    "RewardScores",
    "ThinkFormat",
    "call_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
