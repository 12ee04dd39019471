"""Rewards: functions that score completions, and how they are called and combined.

Names are imported on first use, so that ``import lit_rlhf.rewards`` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rlhf.rewards.adapters import ComputeScore, Guarded, RewardFunc
    from lit_rlhf.rewards.calling import call_reward
    from lit_rlhf.rewards.code import CodeTests
    from lit_rlhf.rewards.combine import RewardScorer, RewardScores
    from lit_rlhf.rewards.contract import RewardOutput
    from lit_rlhf.rewards.countdown import Countdown
    from lit_rlhf.rewards.json_schema import JSONSchema
    from lit_rlhf.rewards.length import LengthReward, SoftOverlongPenalty
    from lit_rlhf.rewards.math import MathAnswer
    from lit_rlhf.rewards.protocol import RewardFunction
    from lit_rlhf.rewards.reasoning_gym import ReasoningGymAnswer
    from lit_rlhf.rewards.repetition import RepetitionPenalty
    from lit_rlhf.rewards.reward_model import RewardModel
    from lit_rlhf.rewards.text import ExactMatch, FormatMatch, ThinkFormat
    from lit_rlhf.rewards.workers import InWorkers

_MODULES = {
    "CodeTests": "code",
    "ComputeScore": "adapters",
    "Countdown": "countdown",
    "ExactMatch": "text",
    "FormatMatch": "text",
    "Guarded": "adapters",
    "InWorkers": "workers",
    "JSONSchema": "json_schema",
    "LengthReward": "length",
    "MathAnswer": "math",
    "RepetitionPenalty": "repetition",
    "RewardFunc": "adapters",
    "ReasoningGymAnswer": "reasoning_gym",
    "RewardFunction": "protocol",
    "RewardModel": "reward_model",
    "RewardOutput": "contract",
    "RewardScorer": "combine",
    "RewardScores": "combine",
    "SoftOverlongPenalty": "length",
    "ThinkFormat": "text",
    "call_reward": "calling",
}

__all__ = [
    "CodeTests",
    "ComputeScore",
    "Countdown",
    "ExactMatch",
    "FormatMatch",
    "Guarded",
    "InWorkers",
    "JSONSchema",
    "LengthReward",
    "MathAnswer",
    "ReasoningGymAnswer",
    "RepetitionPenalty",
    "RewardFunc",
    "RewardFunction",
    "RewardModel",
    "RewardOutput",
    "RewardScorer",
    "RewardScores",
    "SoftOverlongPenalty",
    "ThinkFormat",
    "call_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
