"""Masks, lengths and the reductions over them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.functional import lengths_to_first_eos, mask_from_lengths, masked_mean, masked_sum, position_ids

property_test = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def values_and_mask(draw):
    """Two equally long lists: numbers and booleans."""
    size = draw(st.integers(1, 12))
    values = draw(st.lists(st.floats(-100, 100), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return values, mask


@pytest.mark.parametrize(
    ("row", "length"),
    [
        ([11, 12, 2, 2, 2], 3),  # the first end token counts, the padding with the same id does not
        ([2, 2, 2, 2, 2], 1),
        ([7, 8, 2, 2], 3),
        ([7, 8, 9, 10], 4),  # cut at the limit: nothing is appended
        ([7, 8, 9, 2], 4),  # ends exactly at the limit
        ([2], 1),
        ([7], 1),
    ],
)
def test_length_runs_to_the_first_eos(row, length):
    lengths = lengths_to_first_eos(torch.tensor([row]), (2,))
    assert lengths.dtype == torch.int64
    assert lengths.tolist() == [length]
    assert mask_from_lengths(lengths, len(row))[0].tolist() == [column < length for column in range(len(row))]


@property_test
@given(
    st.integers(1, 8).flatmap(
        lambda width: st.lists(st.lists(st.integers(0, 4), min_size=width, max_size=width), min_size=1, max_size=5)
    ),
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
)
def test_lengths_match_a_plain_loop(rows, eos_ids):
    expected = []
    for row in rows:
        length = 0
        for token in row:
            length += 1
            if token in eos_ids:
                break
        expected.append(length)
    assert lengths_to_first_eos(torch.tensor(rows), eos_ids).tolist() == expected


def test_empty_width_has_length_zero():
    lengths = lengths_to_first_eos(torch.zeros(3, 0, dtype=torch.long), (2,))
    assert lengths.tolist() == [0, 0, 0]
    assert mask_from_lengths(lengths, 0).shape == (3, 0)


@property_test
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 7))
def test_mask_has_the_first_length_columns(lengths, width):
    mask = mask_from_lengths(torch.tensor(lengths), width)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[column < length for column in range(width)] for length in lengths]


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),
        ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
        ([0, 0, 0, 0, 1], [0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([0, 1, 1, 0, 0], [0, 0, 1, 1, 1]),
    ],
)
def test_positions_count_real_tokens(mask, positions):
    assert position_ids(torch.tensor([mask], dtype=torch.bool)).tolist() == [positions]


@property_test
@given(st.integers(0, 6), st.integers(1, 6))
def test_left_padding_never_shifts_positions(padding, length):
    mask = torch.tensor([[False] * padding + [True] * length])
    assert position_ids(mask)[0, padding:].tolist() == list(range(length))


@property_test
@given(values_and_mask(), st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e300]))
def test_masked_entries_reach_neither_value_nor_gradient(case, garbage):
    values, mask_list = case
    mask = torch.tensor(mask_list)
    kept = [value for value, keep in zip(values, mask_list, strict=True) if keep]
    spoilt = torch.where(mask, torch.tensor(values, dtype=torch.float64), garbage).requires_grad_()

    total, mean = masked_sum(spoilt, mask), masked_mean(spoilt, mask)
    assert total.item() == pytest.approx(sum(kept), abs=1e-10)
    assert mean.item() == pytest.approx(sum(kept) / max(len(kept), 1), abs=1e-10)

    (gradient,) = torch.autograd.grad(mean, spoilt)
    torch.testing.assert_close(gradient, mask.double() / max(len(kept), 1))


def test_empty_mask_is_exactly_zero_with_a_graph():
    values = torch.tensor([[float("nan"), float("inf"), 3.0]], requires_grad=True)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    for result in (
        masked_mean(values, nothing),
        masked_sum(values, nothing),
        masked_sum(values, nothing, dim=-1).sum(),
    ):
        assert result.item() == 0.0
        (gradient,) = torch.autograd.grad(result, values)
        assert gradient.tolist() == [[0.0, 0.0, 0.0]]


def test_masked_sum_along_a_dimension():
    values = torch.arange(6.0).view(2, 3)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    assert masked_sum(values, mask, dim=-1).tolist() == [2.0, 5.0]
    assert masked_sum(values, mask, dim=0).tolist() == [0.0, 0.0, 7.0]
    assert masked_sum(values, mask).item() == 7.0


def test_arguments_are_left_as_they_were():
    values, mask = torch.tensor([1.0, float("nan")]), torch.tensor([True, False])
    masked_mean(values, mask)
    assert values[0].item() == 1.0
    assert values[1].isnan()
    assert mask.tolist() == [True, False]
