"""torchmetrics classes: sums and counts over batches and ranks, divided once at the end."""

from lit_rlhf.metrics.iteration import IterationMetrics
from lit_rlhf.metrics.pass_at_k import PassAtK

__all__ = ["IterationMetrics", "PassAtK"]
