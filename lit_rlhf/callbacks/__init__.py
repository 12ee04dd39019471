"""Callbacks: one behaviour per file. Subclass :class:`RolloutCallback` to see or change the rollout."""

from lit_rlhf.callbacks.adaptive_kl import AdaptiveKL
from lit_rlhf.callbacks.advantage_clip import AdvantageClip
from lit_rlhf.callbacks.completion_writer import CompletionWriter
from lit_rlhf.callbacks.difficulty_sampler import DifficultySampler
from lit_rlhf.callbacks.distributions import Distributions
from lit_rlhf.callbacks.divergence_report import DivergenceReport
from lit_rlhf.callbacks.dynamic_sampling import DynamicSampling
from lit_rlhf.callbacks.early_stop_inner_epochs import EarlyStopInnerEpochs
from lit_rlhf.callbacks.evaluation_writer import EvaluationWriter
from lit_rlhf.callbacks.export_policy import ExportPolicy
from lit_rlhf.callbacks.graceful_stop import GracefulStop
from lit_rlhf.callbacks.health import HealthRule
from lit_rlhf.callbacks.health_monitor import HealthMonitor
from lit_rlhf.callbacks.kl_schedule import KLSchedule
from lit_rlhf.callbacks.normalize_rewards import NormalizeRewards
from lit_rlhf.callbacks.overoptimization_monitor import OveroptimizationMonitor
from lit_rlhf.callbacks.reference_sync import ReferenceSync
from lit_rlhf.callbacks.resume_guard import ResumeGuard
from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.callbacks.run_summary import RunSummary
from lit_rlhf.callbacks.sample_table import SampleTable
from lit_rlhf.callbacks.std_threshold_mask import StdThresholdMask
from lit_rlhf.callbacks.throughput import Throughput
from lit_rlhf.callbacks.token_budget import TokenBudget
from lit_rlhf.callbacks.warmup_cosine import WarmupCosine

__all__ = [
    "AdaptiveKL",
    "AdvantageClip",
    "CompletionWriter",
    "DifficultySampler",
    "Distributions",
    "DivergenceReport",
    "DynamicSampling",
    "EarlyStopInnerEpochs",
    "EvaluationWriter",
    "ExportPolicy",
    "GracefulStop",
    "HealthMonitor",
    "HealthRule",
    "KLSchedule",
    "NormalizeRewards",
    "OveroptimizationMonitor",
    "ReferenceSync",
    "ResumeGuard",
    "RolloutCallback",
    "RunSummary",
    "SampleTable",
    "StdThresholdMask",
    "Throughput",
    "TokenBudget",
    "WarmupCosine",
]
