"""Callbacks: one behaviour per file. Subclass :class:`RolloutCallback` to see or change the rollout."""

from lit_rlhf.callbacks.adaptive_kl import AdaptiveKL
from lit_rlhf.callbacks.completion_writer import CompletionWriter
from lit_rlhf.callbacks.export_policy import ExportPolicy
from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.callbacks.run_summary import RunSummary
from lit_rlhf.callbacks.sample_table import SampleTable
from lit_rlhf.callbacks.std_threshold_mask import StdThresholdMask
from lit_rlhf.callbacks.warmup_cosine import WarmupCosine

__all__ = [
    "AdaptiveKL",
    "CompletionWriter",
    "ExportPolicy",
    "RolloutCallback",
    "RunSummary",
    "SampleTable",
    "StdThresholdMask",
    "WarmupCosine",
]
