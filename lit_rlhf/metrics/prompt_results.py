"""Results of held-out prompts: means with their intervals, each prompt once, over batches, ranks and data sets."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lit_rlhf.functional.bootstrap import bootstrap_interval


class PromptResults(Metric):
    """Means over prompts, and bootstrap intervals over prompts, of any number of quantities.

    Every rank keeps one row per prompt; they are gathered and ordered at the end, so that neither the batches nor the
    ranks change a digit.

    Args:
        names: Quantities.
        set_names: Data sets; one without a name stands alone. Quantities of a set are called ``<set>/<quantity>``, and
            those without a set are over all prompts of all sets.
        shares: Quantities that can only be between 0 and 1.
        with_interval: Quantities that get ``<quantity>_low`` and ``<quantity>_high``.
        confidence: Of the intervals; ``None`` for none.

    >>> results = PromptResults(["accuracy"])
    >>> results.update(0, torch.tensor([0, 1]), {"accuracy": (torch.tensor([1.0, 0.0]), torch.ones(2))})
    >>> results.update(0, torch.tensor([2]), {"accuracy": (torch.tensor([1.0]), torch.ones(1))})
    >>> round(results.compute()["accuracy"], 4)
    0.6667
    """

    full_state_update = False
    rows: list[Tensor]

    def __init__(
        self,
        names: Sequence[str],
        set_names: Sequence[str] = ("",),
        shares: Collection[str] = (),
        with_interval: Collection[str] = (),
        confidence: float | None = None,
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.set_names = tuple(set_names)
        self.confidence = confidence
        self._share_mask = torch.tensor([name in shares for name in names])
        self._intervals = [place for place, name in enumerate(names) if name in with_interval]
        # Of each prompt: its set, its place in the source, the sums of all quantities, their counts.
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, set_place: int, prompt_index: Tensor, values: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add ``M`` prompts of one set, none of them for the second time.

        Args:
            set_place: Of the set in ``set_names``.
            prompt_index: ``(M,)`` int64 places in the source.
            values: Of each quantity the sum over what there is of it in each prompt, ``(M,)``, and how much there is,
                ``(M,)``; 0 where a prompt has none.
        """
        index = prompt_index.to(self.device, torch.float64)
        sums, counts = ([values[name][part].to(self.device, torch.float64) for name in self.names] for part in range(2))
        self.rows.append(torch.stack([torch.full_like(index, set_place), index, *sums, *counts], dim=1))

    def compute(self) -> dict[str, float]:
        """Every quantity by name; one that no prompt has is left out."""
        rows = dim_zero_cat(self.rows).cpu() if len(self.rows) else torch.zeros(0)
        if not rows.numel():
            return {}
        for key in (1, 0):  # by set, and in a set by prompt
            rows = rows[rows[:, key].argsort(stable=True)]
        values: dict[str, float] = {}
        if len(self.set_names) > 1 or self.set_names[0]:
            for place, name in enumerate(self.set_names):
                own = rows[rows[:, 0] == place]
                values.update({f"{name}/{quantity}": value for quantity, value in self._means(own).items()})
        return {**self._means(rows), **values}

    def _means(self, rows: Tensor) -> dict[str, float]:
        sums, counts = rows[:, 2:].chunk(2, dim=1)
        values = dict(zip(self.names, (sums.sum(dim=0) / counts.sum(dim=0)).tolist(), strict=True))
        if self.confidence is not None and self._intervals:
            chosen = self._intervals
            ends = bootstrap_interval(
                sums[:, chosen], counts[:, chosen], self.confidence, self._share_mask[chosen], rows[:, 0].long()
            )
            for end, found in zip(("low", "high"), ends, strict=True):
                values.update({f"{self.names[at]}_{end}": x for at, x in zip(chosen, found.tolist(), strict=True)})
        return {name: value for name, value in values.items() if not math.isnan(value)}
