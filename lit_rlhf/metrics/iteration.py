"""Every quantity of one iteration in one metric: two reductions, whatever their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class IterationMetrics(Metric):
    """Means as sum over count, maxima and minima, over all micro-batches and ranks. Never a mean of means.

    Args:
        means: Names of the means.
        maxima: Names of the maxima.
        minima: Names of the minima.

    >>> metrics = IterationMetrics(["kl"], [])
    >>> metrics.update({"kl": (torch.tensor(2.0), 20)})
    >>> metrics.update({"kl": (torch.tensor(2.0), 4)})
    >>> round(metrics.compute()["kl"], 4)
    0.1667
    """

    full_state_update = False
    sums: Tensor
    counts: Tensor
    peaks: Tensor

    def __init__(self, means: Sequence[str], maxima: Sequence[str], minima: Sequence[str] = ()) -> None:
        super().__init__()
        self.means = {name: place for place, name in enumerate(means)}
        self.maxima = {name: place for place, name in enumerate(maxima)}
        self.minima = {name: place for place, name in enumerate(minima, start=len(maxima))}
        self.add_state("sums", torch.zeros(len(means), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(len(means), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state(
            "peaks", torch.full((len(maxima) + len(minima),), -torch.inf, dtype=torch.float64), dist_reduce_fx="max"
        )

    def update(
        self,
        means: Mapping[str, tuple[Tensor | float, Tensor | float]],
        maxima: Mapping[str, Tensor] | None = None,
        minima: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add one micro-batch.

        Args:
            means: Sum and count by name; what is not named adds nothing.
            maxima: Largest value by name.
            minima: Smallest value by name.
        """
        for name, (total, count) in means.items():
            place = self.means[name]
            self.sums[place] += torch.as_tensor(total, dtype=torch.float64, device=self.sums.device).detach()
            self.counts[place] += torch.as_tensor(count, dtype=torch.float64, device=self.sums.device)
        # A minimum is kept as the maximum of its negative: one state, one reduction.
        peaks = [(self.maxima[name], value) for name, value in (maxima or {}).items()]
        peaks += [(self.minima[name], -value) for name, value in (minima or {}).items()]
        for place, value in peaks:
            self.peaks[place] = torch.maximum(self.peaks[place], value.detach().to(self.peaks))

    def so_far(self, name: str) -> Tensor:
        """Sum and count of a mean on this rank, ``(2,)`` float64, since the last reset.

        Args:
            name: Of the mean.
        """
        place = self.means[name]
        return torch.stack([self.sums[place], self.counts[place]])

    def compute(self) -> dict[str, float]:
        """All of them by name; a name with an empty window is left out, never 0 or NaN. A NaN put in comes out."""
        sums, counts, peaks = self.sums.tolist(), self.counts.tolist(), self.peaks.tolist()
        values = {name: sums[place] / counts[place] for name, place in self.means.items() if counts[place] > 0}
        values.update({name: peaks[place] for name, place in self.maxima.items() if peaks[place] != -float("inf")})
        values.update({name: -peaks[place] for name, place in self.minima.items() if peaks[place] != -float("inf")})
        return values
