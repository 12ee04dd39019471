"""Clipped loss and aggregation: values, gradients, and independence from the split into micro-batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.functional import (
    aggregate,
    clipped_policy_loss,
    clipped_tokens,
    clipped_weight_loss,
    importance_ratio,
    loss_denominator,
    sequence_ratio,
)
from lit_rlhf.functional.losses import AGGREGATIONS

property_test = settings(max_examples=60, deadline=None, derandomize=True)
RATIOS = [0.5, 0.9, 1.0, 1.5]


@pytest.mark.parametrize(
    ("advantage", "losses", "gradients", "clipped"),
    [
        (1.0, [-0.5, -0.9, -1.0, -1.2], [-1.0, -1.0, -1.0, 0.0], [False, False, False, True]),
        (-1.0, [0.8, 0.9, 1.0, 1.5], [0.0, 1.0, 1.0, 1.0], [True, False, False, False]),
    ],
)
def test_clip_table(advantage, losses, gradients, clipped):
    ratio = torch.tensor(RATIOS, requires_grad=True)
    advantages = torch.full((4,), advantage)
    loss = clipped_policy_loss(ratio, advantages)
    assert loss.tolist() == pytest.approx(losses, abs=1e-6)
    assert torch.autograd.grad(loss.sum(), ratio)[0].tolist() == gradients
    assert clipped_tokens(ratio, advantages).tolist() == clipped


def test_clip_fraction_counts_tokens_without_a_gradient():
    ratio = torch.tensor([RATIOS, RATIOS])
    advantages = torch.tensor([[1.0] * 4, [-1.0] * 4])
    assert clipped_tokens(ratio, advantages).float().mean().item() == 0.25


def test_the_two_ranges_are_separate():
    ratio = torch.tensor([1.25, 1.3, 0.75, 0.65], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = clipped_policy_loss(ratio, advantages, clip_low=0.3, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.25, -1.28, 0.75, 0.7], abs=1e-6)
    assert torch.autograd.grad(loss.sum(), ratio)[0].tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert clipped_tokens(ratio, advantages, clip_low=0.3, clip_high=0.28).tolist() == [False, True, False, True]


@property_test
@given(
    st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(-5, 5)), min_size=1, max_size=8),
    st.floats(0.0, 0.9),
    st.floats(0.0, 2.0),
)
def test_gradient_is_the_negative_advantage_except_where_clipped(tokens, clip_low, clip_high):
    ratio = torch.tensor([r for r, _ in tokens], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([a for _, a in tokens], dtype=torch.float64)
    loss = clipped_policy_loss(ratio, advantages, clip_low, clip_high)
    clipped = clipped_tokens(ratio, advantages, clip_low, clip_high)
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), ratio)[0], torch.where(clipped, 0.0, -advantages), rtol=0, atol=1e-14
    )
    assert (loss >= -ratio * advantages).all()  # a pessimistic bound: clipping never makes the loss smaller


@property_test
@given(st.lists(st.tuples(st.floats(-40, 0), st.floats(-5, 5)), min_size=1, max_size=8))
def test_first_step_is_the_plain_policy_gradient(tokens):
    log_probs = torch.tensor([lp for lp, _ in tokens], requires_grad=True)
    advantages = torch.tensor([a for _, a in tokens])
    ratio = importance_ratio(log_probs, log_probs.detach())
    assert ratio.tolist() == [1.0] * len(tokens)
    assert not clipped_tokens(ratio, advantages).any()
    (gradient,) = torch.autograd.grad(clipped_policy_loss(ratio, advantages).sum(), log_probs)
    assert torch.equal(gradient, -advantages)


def test_ratio_is_bounded():
    difference = torch.tensor([-1e4, -20.5, -3.0, 3.0, 20.5, 1e4], requires_grad=True)
    ratio = importance_ratio(difference, torch.zeros(6))
    bound = [math.exp(-20)] * 2 + [math.exp(-3), math.exp(3)] + [math.exp(20)] * 2
    assert ratio.tolist() == pytest.approx(bound, rel=1e-6)
    (gradient,) = torch.autograd.grad(ratio.sum(), difference)
    assert gradient[[0, 1, 4, 5]].tolist() == [0.0] * 4
    torch.testing.assert_close(gradient[2:4], ratio[2:4].detach())


@pytest.mark.parametrize(
    ("aggregation", "value", "gradients"),
    [
        ("token_mean", 3.25, [1 / 8, 1 / 8]),
        ("sequence_mean", 2.5, [1 / 4, 1 / 12]),
        ("sequence_sum", 13.0, [1 / 2, 1 / 2]),
        ("constant", 1.625, [1 / 16, 1 / 16]),
    ],
)
@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]]])
def test_short_and_long_completion(aggregation, value, gradients, split):
    losses = torch.tensor([[1.0, 1, 9, 9, 9, 9], [4, 4, 4, 4, 4, 4]], requires_grad=True)
    mask = torch.tensor([[True] * 2 + [False] * 4, [True] * 6])
    denominator = sum(loss_denominator(mask[rows], aggregation, max_new_tokens=8) for rows in split)
    total = sum(aggregate(losses[rows], mask[rows], denominator, aggregation) for rows in split)
    assert total.item() == pytest.approx(value, rel=1e-6)
    (gradient,) = torch.autograd.grad(total, losses)
    torch.testing.assert_close(gradient, mask * torch.tensor(gradients)[:, None])


@st.composite
def split_batches(draw):
    """A mask with holes and empty rows, and the micro-batch of each row; numbers no row has are empty micro-batches."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    mask = draw(
        st.lists(
            st.one_of(
                st.lists(st.booleans(), min_size=width, max_size=width),
                st.integers(0, width).map(lambda length: [True] * length + [False] * (width - length)),
            ),
            min_size=rows,
            max_size=rows,
        )
    )
    parts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return torch.tensor(mask), torch.tensor(parts), draw(st.integers(0, 2**20))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@property_test
@given(case=split_batches())
def test_any_split_has_the_same_loss_and_gradient(aggregation, case):
    mask, parts, seed = case
    generator = torch.Generator().manual_seed(seed)
    log_probs, old, advantages = torch.randn(3, *mask.shape, generator=generator, dtype=torch.float64)
    log_probs.requires_grad_()

    def loss(rows, denominator):
        per_token = clipped_policy_loss(importance_ratio(log_probs[rows], old[rows]), advantages[rows])
        return aggregate(per_token, mask[rows], denominator, aggregation)

    micro_batches = [parts == part for part in range(4)]
    whole = loss_denominator(mask, aggregation, max_new_tokens=7)
    assert sum(loss_denominator(mask[rows], aggregation, max_new_tokens=7) for rows in micro_batches) == whole

    one, many = loss(slice(None), whole), sum(loss(rows, whole) for rows in micro_batches)
    torch.testing.assert_close(many, one, rtol=0, atol=1e-12)
    (one_gradient,) = torch.autograd.grad(one, log_probs)
    (many_gradient,) = torch.autograd.grad(many, log_probs)
    torch.testing.assert_close(many_gradient, one_gradient, rtol=0, atol=1e-12)
    assert (one_gradient[~mask] == 0).all()


@property_test
@given(case=split_batches())
def test_aggregations_equal_plain_loops(case):
    mask, _, seed = case
    losses = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = [
        [x for x, keep in zip(*pair, strict=True) if keep] for pair in zip(losses.tolist(), mask.tolist(), strict=True)
    ]
    tokens = [x for row in rows for x in row]
    means = [sum(row) / len(row) for row in rows if row]
    expected = {
        "token_mean": sum(tokens) / max(len(tokens), 1),
        "sequence_mean": sum(means) / max(len(means), 1),
        "sequence_sum": sum(tokens) / max(len(means), 1),
        "constant": sum(tokens) / (len(rows) * 7),
    }
    for aggregation in AGGREGATIONS:
        denominator = loss_denominator(mask, aggregation, max_new_tokens=7)
        value = aggregate(losses, mask, denominator, aggregation).item()
        assert value == pytest.approx(expected[aggregation], abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", [0.0, 5.0])
def test_fully_masked_micro_batch_is_exactly_zero_with_a_graph(aggregation, denominator):
    losses = torch.tensor([[float("nan"), float("inf")], [-float("inf"), 1.0]], requires_grad=True)
    loss = aggregate(losses, torch.zeros(2, 2, dtype=torch.bool), denominator, aggregation)
    assert loss.item() == 0.0
    assert loss.grad_fn is not None
    assert torch.autograd.grad(loss, losses)[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_spoilt_padding_does_not_leak(aggregation):
    mask = torch.tensor([[True, True, False], [False, False, False]])
    clean = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    nan, inf = float("nan"), float("inf")
    spoilt = torch.tensor([[1.0, 2.0, nan], [inf, -inf, nan]], requires_grad=True)
    one, other = (aggregate(losses, mask, 4.0, aggregation) for losses in (clean, spoilt))
    assert one.item() == other.item() != 0.0
    assert torch.equal(torch.autograd.grad(one, clean)[0], torch.autograd.grad(other, spoilt)[0])


def test_denominators():
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    assert loss_denominator(mask) == 5.0
    assert loss_denominator(mask, "sequence_mean") == 2.0  # an empty row is no sequence
    assert loss_denominator(mask, "constant", max_new_tokens=4) == 12.0  # but a row all the same


def test_unknown_aggregation_is_an_error():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"aggregation must be one of token_mean, .*, constant"):
        loss_denominator(mask, "mean")
    with pytest.raises(ValueError, match=r"aggregation must be one of token_mean, .*, constant"):
        aggregate(torch.ones(1, 2), mask, 1.0, "mean")


def test_constant_needs_the_sampling_limit():
    with pytest.raises(ValueError, match="max_new_tokens"):
        loss_denominator(torch.ones(1, 2, dtype=torch.bool), "constant")


def test_dual_clip_bounds_the_price_of_a_negative_advantage():
    ratio = torch.tensor([0.5, 1.0, 2.9, 3.1, 50.0], requires_grad=True)
    negative, positive = torch.full((5,), -2.0), torch.full((5,), 2.0)
    loss = clipped_policy_loss(ratio, negative, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([1.6, 2.0, 5.8, 6.0, 6.0])
    assert torch.autograd.grad(loss.sum(), ratio)[0].tolist() == [0.0, 2.0, 2.0, 0.0, 0.0]
    assert clipped_tokens(ratio, negative, dual_clip=3.0).tolist() == [True, False, False, True, True]
    assert torch.equal(clipped_policy_loss(ratio, positive, dual_clip=3.0), clipped_policy_loss(ratio, positive))
    assert torch.equal(clipped_tokens(ratio, positive, dual_clip=3.0), clipped_tokens(ratio, positive))


def test_a_clipped_weight_bounds_a_token_and_never_silences_it():
    """The gradient of a log-prob is the bounded ratio times the advantage, on both sides of the range."""
    ratio, log_probs = torch.tensor([0.1, 0.9, 1.1, 9.0]), torch.full((4,), -1.0, requires_grad=True)
    for sign in (1.0, -1.0):
        loss = clipped_weight_loss(ratio, log_probs, torch.full((4,), sign), clip_low=0.5, clip_high=1.0)
        assert torch.autograd.grad(loss.sum(), log_probs)[0].tolist() == pytest.approx(
            [-sign * weight for weight in (0.5, 0.9, 1.1, 2.0)]
        )
    unbounded = clipped_weight_loss(ratio, log_probs, torch.ones(4), clip_low=1.0, clip_high=1.0)
    assert torch.autograd.grad(unbounded.sum(), log_probs)[0].tolist() == pytest.approx([-0.1, -0.9, -1.1, -2.0])


@property_test
@given(case=split_batches(), clip=st.sampled_from([0.02, 0.2]))
def test_inside_the_range_every_surrogate_has_the_same_gradient(case, clip):
    """They differ only in what happens outside."""
    mask, _, seed = case
    generator = torch.Generator().manual_seed(seed)
    log_probs, advantages = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)
    log_probs.requires_grad_()
    old = log_probs.detach() + clip / 2 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    ratio = importance_ratio(log_probs, old)
    clipped = aggregate(clipped_policy_loss(ratio, advantages, clip, clip), mask, 1.0)
    weighted = aggregate(clipped_weight_loss(ratio, log_probs, advantages, clip, clip), mask, 1.0)
    one, other = (torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for loss in (clipped, weighted))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@property_test
@given(case=split_batches())
def test_token_form_of_the_sequence_ratio_is_the_sequence_ratio(aggregation, case):
    """Value and gradient of the loss are those of the ratio written out for whole completions."""
    mask, _, seed = case
    generator = torch.Generator().manual_seed(seed)
    log_probs, old = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64) / 3
    advantages = torch.randn(len(mask), 1, generator=generator, dtype=torch.float64).expand_as(mask)
    log_probs.requires_grad_()
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    whole = ((log_probs - old) * mask).sum(dim=1, keepdim=True).div(lengths).exp().expand_as(mask)
    denominator = loss_denominator(mask, aggregation, max_new_tokens=7)
    found, expected = (
        aggregate(clipped_policy_loss(ratio, advantages, 0.1, 0.2), mask, denominator, aggregation)
        for ratio in (sequence_ratio(log_probs, old, mask), whole)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    one, other = (torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_sequence_ratio_is_exactly_one_with_a_gradient_for_equal_policies():
    log_probs = torch.tensor([[-0.1, -2.3, -0.7]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    ratio = sequence_ratio(log_probs, log_probs.detach(), mask)
    assert (ratio == 1.0).all()
    assert torch.autograd.grad(ratio[mask].sum(), log_probs)[0].tolist() == [[1.0, 0.0, 1.0]]


def test_sequence_ratio_skips_holes_and_is_bounded():
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    now = torch.tensor([[1.0, float("nan"), 3.0], [5.0, 5.0, 5.0], [900.0, 0.0, 0.0]])
    ratio = sequence_ratio(now, torch.zeros(3, 3), mask)
    assert ratio[0, [0, 2]].tolist() == pytest.approx([math.exp(2)] * 2)
    assert ratio[1].tolist() == [1.0] * 3
    assert ratio[2].tolist() == pytest.approx([math.exp(20)] * 3)
