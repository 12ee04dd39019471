"""Rollout engines: from prompts to sampled token ids, their log-probs and finish reasons."""

from lit_rlhf.engines.base import AheadEngine, Generation, PendingGeneration, RolloutEngine, SamplingParams
from lit_rlhf.engines.named import make_engine
from lit_rlhf.engines.transformers import TransformersEngine
from lit_rlhf.engines.vllm import VLLMEngine, VLLMServers

__all__ = [
    "AheadEngine",
    "Generation",
    "PendingGeneration",
    "RolloutEngine",
    "SamplingParams",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServers",
    "make_engine",
]
