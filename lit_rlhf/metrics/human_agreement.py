"""What people say of completions, beside what the verifier says."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional import spearman_corrcoef
from torchmetrics.utilities import dim_zero_cat


class HumanAgreement(Metric):
    """Ratings that were joined with completions, over batches and ranks.

    Args:
        num_ratings: Ratings that there are to join.

    >>> metric = HumanAgreement(num_ratings=4)
    >>> metric.update(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.0, 0.5, 1.0]), torch.ones(3))
    >>> {name: round(value, 3) for name, value in metric.compute().items()}
    {'human_rated': 3.0, 'human_unmatched': 1.0, 'human_rating': 2.667, 'human_agreement': 1.0}
    """

    full_state_update = False
    rows: list[Tensor]

    def __init__(self, num_ratings: int) -> None:
        super().__init__()
        self.num_ratings = num_ratings
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, ratings: Tensor, scores: Tensor, num_ratings: Tensor) -> None:
        """Add ``K`` completions with a rating; a completion that was sampled several times is one.

        Args:
            ratings: ``(K,)`` mean rating of each.
            scores: ``(K,)`` the verifier's score; NaN where it abstained.
            num_ratings: ``(K,)`` how many ratings each has.
        """
        self.rows.append(torch.stack([ratings, scores, num_ratings], dim=1).to(self.device, torch.float64))

    def compute(self) -> dict[str, float]:
        """Completions with a rating, ratings without a completion, the mean, and Spearman's rank correlation.

        The mean is left out where nothing was joined, the correlation where all ratings or all scores are the same.
        """
        rows = dim_zero_cat(self.rows).cpu().reshape(-1, 3) if len(self.rows) else torch.zeros(0, 3)
        values = {"human_rated": float(len(rows)), "human_unmatched": self.num_ratings - float(rows[:, 2].sum())}
        if len(rows):
            values["human_rating"] = float(rows[:, 0].mean())
        # In one order on any number of ranks.
        judged = torch.tensor(sorted(rows[~rows[:, 1].isnan(), :2].tolist()), dtype=torch.float64).reshape(-1, 2)
        if len(judged) and bool((judged != judged[0]).any(dim=0).all()):
            values["human_agreement"] = float(spearman_corrcoef(judged[:, 0], judged[:, 1]))
        return values
