"""pass@k against the definition: the share of all k-subsets of the samples that contain a right one."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from lit_rlhf.functional import pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_equals_the_average_over_all_subsets(n):
    for k in range(1, n + 1):
        expected = []
        for correct in range(n + 1):
            samples = [index < correct for index in range(n)]
            expected.append(sum(map(any, itertools.combinations(samples, k))) / math.comb(n, k))
        result = pass_at_k(n, torch.arange(n + 1), k)
        assert result.dtype == torch.float64
        assert result.tolist() == pytest.approx(expected, abs=1e-14)


def test_each_prompt_may_have_its_own_number_of_samples():
    result = pass_at_k(torch.tensor([2, 4, 8]), torch.tensor([1, 1, 2]), k=2)
    assert result.tolist() == pytest.approx([1.0, 0.5, 1 - 15 / 28], abs=1e-14)


def test_many_samples_do_not_overflow():
    expected = 1 - Fraction(math.comb(1997, 1000), math.comb(2000, 1000))
    assert pass_at_k(2000, torch.tensor([3]), k=1000).item() == pytest.approx(float(expected), rel=1e-12)


def test_differs_from_the_biased_plug_in():
    assert pass_at_k(4, torch.tensor([1]), k=4).item() == 1.0  # 1 - (3/4)**4 would be 0.684


@pytest.mark.parametrize(
    ("samples", "correct", "k", "message"),
    [
        (3, [1], 4, "k=4 with 3 samples"),
        (torch.tensor([8, 2]), [1, 1], 4, "k=4 with 2 samples"),
        (3, [1], 0, "k=0"),
        (3, [4], 1, "between 0 and num_samples"),
        (3, [-1], 1, "between 0 and num_samples"),
    ],
)
def test_impossible_requests(samples, correct, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(samples, torch.tensor(correct), k)
