"""Rollout engines: from prompts to sampled token ids, their log-probs and finish reasons."""

from lit_rlhf.engines.base import Generation, RolloutEngine, SamplingParams
from lit_rlhf.engines.transformers import TransformersEngine

__all__ = ["Generation", "RolloutEngine", "SamplingParams", "TransformersEngine"]
