"""KL estimators, value and gradient, against the exact divergence of policies small enough to enumerate.

An expectation is written out as a sum over all tokens (or all two-token sequences), weighted by the detached
probabilities of the sampler, so that a gradient reaches the parameters only through the estimator itself.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.functional import kl_k1, kl_k2, kl_k3, kl_k3_ratio, kl_loss

property_test = settings(max_examples=40, deadline=None, derandomize=True)
sequence_test = settings(max_examples=15, deadline=None, derandomize=True)
VOCAB = 5
logit_vectors = st.lists(st.floats(-3, 3), min_size=VOCAB, max_size=VOCAB)

# Two-token sequences: row 0 of the logits is the first state, row 1 + a the state after token a.
STATES_VOCAB = 3
FIRST = torch.arange(STATES_VOCAB).repeat_interleave(STATES_VOCAB)
SECOND = torch.arange(STATES_VOCAB).repeat(STATES_VOCAB)
state_logits = st.lists(
    st.lists(st.floats(-2, 2), min_size=STATES_VOCAB, max_size=STATES_VOCAB),
    min_size=STATES_VOCAB + 1,
    max_size=STATES_VOCAB + 1,
)


def parameters(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def log_policy(values):
    return torch.tensor(values, dtype=torch.float64).log_softmax(-1)


def exact_kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def gradient(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


def sequence_log_probs(table):
    """``(V * V, 2)``: log-probability of each token of each sequence; ``table`` is ``(1 + V, V)``."""
    return torch.stack([table[0, FIRST], table[1 + FIRST, SECOND]], dim=-1)


@property_test
@given(logit_vectors, logit_vectors)
def test_k1_and_k3_are_unbiased(policy, reference):
    lp, ref = log_policy(policy), log_policy(reference)
    assert_same((lp.exp() * kl_k1(lp, ref)).sum(), exact_kl(lp, ref))
    assert_same((lp.exp() * kl_k3(lp, ref)).sum(), exact_kl(lp, ref))
    assert (kl_k3(lp, ref) >= 0).all()


@property_test
@given(logit_vectors, logit_vectors, logit_vectors)
def test_k3_ratio_is_unbiased_under_the_sampler(policy, reference, sampler):
    lp, ref, old = log_policy(policy), log_policy(reference), log_policy(sampler)
    assert_same((old.exp() * kl_k3_ratio(lp, ref, old)).sum(), exact_kl(lp, ref))


def test_k2_value_agrees_to_second_order():
    base = torch.tensor([0.3, -0.7, 1.1, 0.0, -0.2], dtype=torch.float64)
    direction = torch.tensor([1.0, -0.5, 0.25, 0.8, -1.2], dtype=torch.float64)

    def error_and_kl(step):
        lp, ref = (base + step * direction).log_softmax(-1), base.log_softmax(-1)
        return abs((lp.exp() * kl_k2(lp, ref)).sum() - exact_kl(lp, ref)).item(), exact_kl(lp, ref).item()

    (coarse, coarse_kl), (fine, fine_kl) = error_and_kl(0.02), error_and_kl(0.01)
    assert coarse_kl / fine_kl == pytest.approx(4, rel=0.02)
    assert coarse / fine == pytest.approx(8, rel=0.05)  # the error is of third order


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_divergence_is_from_policy_to_reference(estimator):
    """A sharp policy against a flat reference, and the other way round, near enough for k2 to tell them apart."""
    sharp, flat = log_policy([1.2, 0, 0, 0, 0]), log_policy([0.0] * 5)
    forward, backward = exact_kl(sharp, flat), exact_kl(flat, sharp)
    assert abs(forward - backward) > 0.005
    if estimator is kl_k2:
        assert (sharp.exp() * estimator(sharp, flat)).sum() > forward
    else:
        assert_same((sharp.exp() * estimator(sharp, flat)).sum(), forward)
        assert_same((flat.exp() * estimator(flat, sharp)).sum(), backward)


@property_test
@given(logit_vectors, logit_vectors)
def test_k2_and_k3_ratio_have_the_exact_gradient_on_policy(policy, reference):
    logits, ref = parameters(policy), log_policy(reference)
    lp = logits.log_softmax(-1)
    weight = lp.detach().exp()
    exact = gradient(exact_kl(lp, ref), logits)
    assert_same(gradient((weight * kl_k2(lp, ref)).sum(), logits), exact)
    assert_same(gradient((weight * kl_k3_ratio(lp, ref, lp.detach())).sum(), logits), exact)


@property_test
@given(logit_vectors, logit_vectors, logit_vectors)
def test_k3_ratio_has_the_exact_gradient_off_policy(policy, reference, sampler):
    logits, ref, old = parameters(policy), log_policy(reference), log_policy(sampler)
    lp = logits.log_softmax(-1)
    expected = (old.exp() * kl_k3_ratio(lp, ref, old)).sum()
    assert_same(gradient(expected, logits), gradient(exact_kl(lp, ref), logits))


def test_k2_is_for_on_policy_tokens_only():
    logits, ref, old = parameters([1.0, 0, 0, 0, 0]), log_policy([0, 1.0, 0, 0, 0]), log_policy([0, 0, 2.0, 0, 0])
    lp = logits.log_softmax(-1)
    wrong = gradient((old.exp() * kl_k2(lp, ref)).sum(), logits)
    assert (wrong - gradient(exact_kl(lp, ref), logits)).abs().max() > 0.1


@property_test
@given(logit_vectors, logit_vectors)
def test_k1_as_a_loss_does_not_know_the_reference(policy, reference):
    logits, ref = parameters(policy), log_policy(reference)
    lp = logits.log_softmax(-1)
    assert_same(gradient((lp.detach().exp() * kl_k1(lp, ref)).sum(), logits), torch.zeros(VOCAB, dtype=torch.float64))
    one_token = [gradient(kl_k1(lp, other)[2], logits) for other in (ref, log_policy([5.0, 0, -5, 0, 0]))]
    assert torch.equal(*one_token)


@property_test
@given(logit_vectors, logit_vectors)
def test_plain_k3_as_a_loss_pulls_in_the_other_direction(policy, reference):
    logits, ref = parameters(policy), log_policy(reference)
    lp = logits.log_softmax(-1)
    assert_same(
        gradient((lp.detach().exp() * kl_k3(lp, ref)).sum(), logits),
        gradient(exact_kl(ref, lp), logits),
    )


@sequence_test
@given(state_logits, state_logits, st.floats(0.01, 1.0))
def test_k1_in_the_reward_gives_the_gradient_of_the_sequence_kl(policy, reference, coef):
    logits = parameters(policy)
    lp, ref = sequence_log_probs(logits.log_softmax(-1)), sequence_log_probs(log_policy(reference))
    weight = lp.detach().sum(-1).exp()
    reward = -coef * kl_k1(lp.detach(), ref).sum(-1)

    reinforce = gradient((weight * reward * lp.sum(-1)).sum(), logits)
    sequence_kl = exact_kl(lp.sum(-1), ref.sum(-1))
    assert_same(reinforce, -coef * gradient(sequence_kl, logits))


@sequence_test
@given(state_logits, state_logits, state_logits)
def test_k3_ratio_in_the_loss_gives_the_gradient_of_the_per_state_kl(policy, reference, sampler):
    """With the distribution of the prefixes held fixed at the sampler's, on and off policy."""
    logits = parameters(policy)
    table, ref_table = logits.log_softmax(-1), log_policy(reference)
    lp, ref = sequence_log_probs(table), sequence_log_probs(ref_table)
    state_kl = exact_kl(table, ref_table)  # (1 + V,)

    for old_table in (table.detach(), log_policy(sampler)):
        old = sequence_log_probs(old_table)
        loss = (old.sum(-1).exp() * kl_k3_ratio(lp, ref, old).sum(-1)).sum()
        fixed_prefixes = state_kl[0] + (old_table[0].exp() * state_kl[1:]).sum()
        assert_same(loss, fixed_prefixes)
        assert_same(gradient(loss, logits), gradient(fixed_prefixes, logits))


@sequence_test
@given(state_logits, state_logits)
def test_what_the_loss_term_leaves_out_is_the_kl_of_later_tokens(policy, reference):
    logits = parameters(policy)
    table, ref_table = logits.log_softmax(-1), log_policy(reference)
    lp, ref = sequence_log_probs(table), sequence_log_probs(ref_table)
    in_loss = (lp.detach().sum(-1).exp() * kl_k3_ratio(lp, ref, lp.detach()).sum(-1)).sum()
    later = (table[0].exp() * exact_kl(table, ref_table)[1:].detach()).sum()
    sequence_kl = exact_kl(lp.sum(-1), ref.sum(-1))
    assert_same(in_loss, sequence_kl)  # the values agree, the gradients do not
    assert_same(gradient(in_loss, logits) + gradient(later, logits), gradient(sequence_kl, logits))


def test_the_two_placements_differ():
    """States that agree with the reference before the first token but not after it: only the reward looks ahead."""
    logits = parameters([[0.0, 0, 0], [2.0, 0, 0], [0.0, 0, 0], [0.0, 0, 0]])
    lp, ref = sequence_log_probs(logits.log_softmax(-1)), sequence_log_probs(log_policy([[0.0, 0, 0]] * 4))
    weight = lp.detach().sum(-1).exp()
    in_loss = gradient((weight * kl_k3_ratio(lp, ref, lp.detach()).sum(-1)).sum(), logits)
    in_reward = gradient((weight * kl_k1(lp.detach(), ref).sum(-1) * lp.sum(-1)).sum(), logits)
    assert in_loss[0].abs().max() < 1e-15
    assert in_reward[0, 0] > 0.05  # descent makes the token rarer that leads to the diverging state


@property_test
@given(logit_vectors)
def test_policy_equal_to_reference_is_exactly_zero(policy):
    lp = log_policy(policy).requires_grad_()
    ref = lp.detach().clone()
    for value in (kl_k2(lp, ref), kl_k3(lp, ref), kl_k3_ratio(lp, ref, ref)):
        assert value.tolist() == [0.0] * VOCAB
        assert gradient(value.sum(), lp).tolist() == [0.0] * VOCAB
    assert kl_k1(lp, ref).tolist() == [0.0] * VOCAB


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        (kl_k1, [0.5, -0.5, 0.0], [1.0, 1.0, 1.0]),
        (kl_k2, [0.125, 0.125, 0.0], [0.5, -0.5, 0.0]),
        (kl_k3, [0.1065, 0.1487, 0.0], [0.3935, -0.6487, 0.0]),
        (lambda lp, ref: kl_k3_ratio(lp, ref, lp.detach()), [0.1065, 0.1487, 0.0], [0.5, -0.5, 0.0]),
    ],
    ids=["k1", "k2", "k3", "k3_ratio"],
)
def test_values_and_gradients_on_three_tokens(estimator, values, gradients):
    lp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    ref = torch.tensor([-1.5, -1.5, -0.5])
    result = estimator(lp, ref)
    assert result.tolist() == pytest.approx(values, abs=5e-5)
    assert gradient(result.sum(), lp).tolist() == pytest.approx(gradients, abs=5e-5)


def test_k3_keeps_its_precision_near_the_reference():
    lp, ref = torch.tensor([-1.0]), torch.tensor([-1.0 + 2.0**-12])
    assert kl_k3(lp, ref).item() == pytest.approx(2.0**-25, rel=1e-2)  # 1 + 2**-25 is 1 in float32


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@property_test
@given(logit_vectors, logit_vectors, logit_vectors)
def test_every_ratio_weighted_loss_term_has_the_exact_gradient_off_policy(estimator, policy, reference, sampler):
    logits, ref, old = parameters(policy), log_policy(reference), log_policy(sampler)
    lp = logits.log_softmax(-1)
    expected = (old.exp() * kl_loss(lp, ref, old, estimator, "ratio")).sum()
    assert_same(gradient(expected, logits), gradient(exact_kl(lp, ref), logits))


def test_k2_and_k3_have_the_same_ratio_weighted_gradient_token_by_token():
    lp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    ref, old = torch.tensor([-1.5, -1.0, -0.5]).double(), torch.tensor([-0.9, -2.4, -0.1]).double()
    k2, k3 = (gradient(kl_loss(lp, ref, old, name, "ratio").sum(), lp) for name in ("k2", "k3"))
    assert_same(k2, k3)
    assert_same(k2, (lp - old).exp() * (lp - ref))


def test_plain_loss_terms_are_the_estimators():
    lp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5])
    old = torch.tensor([0.0, -9.0])
    assert torch.equal(kl_loss(lp, ref, old, "k2", "plain"), kl_k2(lp, ref))
    assert torch.equal(kl_loss(lp, ref, old, "k3", "plain"), kl_k3(lp, ref))


@pytest.mark.parametrize("form", [("k1", "plain"), ("k4", "ratio"), ("k3", "none")])
def test_loss_terms_that_do_not_exist(form):
    with pytest.raises(ValueError, match=form[0]):
        kl_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), *form)
