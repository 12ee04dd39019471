"""torchmetrics classes: sums and counts over batches and ranks, divided once at the end."""

from lit_rlhf.metrics.human_agreement import HumanAgreement
from lit_rlhf.metrics.iteration import IterationMetrics
from lit_rlhf.metrics.pass_at_k import PassAtK
from lit_rlhf.metrics.prompt_results import PromptResults

__all__ = ["HumanAgreement", "IterationMetrics", "PassAtK", "PromptResults"]
