r"""Per-token estimates of KL(policy ‖ reference) from sampled tokens.

With ``d = log_probs - ref_log_probs`` and tokens drawn from the policy (Schulman, *Approximating KL Divergence*, 2020):

====================  =======================  ==========================================================
estimator             value                    use
====================  =======================  ==========================================================
:func:`kl_k1`         ``d``                    unbiased; **in the reward**, where it is a constant
:func:`kl_k2`         ``d**2 / 2``             biased value; its gradient is that of the exact KL
:func:`kl_k3`         ``exp(-d) - 1 + d``      unbiased and never negative; good for logging
:func:`kl_k3_ratio`   ``ratio * k3``           **in the loss**: value *and* gradient are those of the exact KL
====================  =======================  ==========================================================

As a loss term ``k1`` is wrong (its gradient does not contain the reference) and plain ``k3`` pulls in the other
direction: its gradient is that of KL(reference ‖ policy).

"Exact" means for each token given the tokens before it. A loss term on sampled tokens leaves the distribution of the
prefixes fixed; only KL in the reward also credits a token with the KL of those that follow it.
:func:`kl_loss` is the loss term in each of these forms.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from lit_rlhf.functional.losses import importance_ratio

KLEstimator = Literal["k1", "k2", "k3"]
KLGradient = Literal["ratio", "plain"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
KL_GRADIENTS: tuple[str, ...] = get_args(KLGradient)


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """``d = log_probs - ref_log_probs``: unbiased, signed. For rewards and logs, never as a loss term.

    Args:
        log_probs: Of the sampled tokens under the policy, any shape, nats.
        ref_log_probs: Same shape, under the reference.

    >>> import torch
    >>> kl_k1(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.5, -0.5]))
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    return log_probs - ref_log_probs


def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """``d**2 / 2``: on on-policy tokens its expected gradient is that of KL(policy ‖ reference).

    Args:
        log_probs: Of the sampled tokens under the policy, any shape, nats.
        ref_log_probs: Same shape, under the reference.

    >>> import torch
    >>> kl_k2(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.5, -0.5]))
    tensor([0.1250, 0.1250, 0.0000])
    """
    return (log_probs - ref_log_probs).square() / 2


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased and non-negative. Its gradient is that of KL(reference ‖ policy).

    Args:
        log_probs: Of the sampled tokens under the policy, any shape, nats.
        ref_log_probs: Same shape, under the reference.

    >>> import torch
    >>> kl_k3(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.5, -0.5]))
    tensor([0.1065, 0.1487, 0.0000])
    """
    d = log_probs - ref_log_probs
    return (-d).expm1() + d


def kl_k3_ratio(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """``exp(log_probs - old_log_probs) * k3``: unbiased in value and gradient, also after the policy has moved.

    The ratio carries a gradient: it is the score-function part that plain ``k3`` lacks. Computed as
    ``exp(ref_log_probs - old_log_probs) + ratio * (d - 1)``, the same number: multiplied out, the gradient vanishes
    with the ratio instead of overflowing where the policy has left a sampled token far behind.

    Args:
        log_probs: Of the sampled tokens under the policy now, any shape, nats.
        ref_log_probs: Same shape, under the reference.
        old_log_probs: Same shape, under the policy that sampled the tokens; no gradient.

    >>> import torch
    >>> lp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    >>> kl_k3_ratio(lp, torch.tensor([-1.5, -1.5, -0.5]), lp.detach()).sum().backward()
    >>> lp.grad  # d, as for k2
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    d = log_probs - ref_log_probs
    return importance_ratio(ref_log_probs, old_log_probs) + importance_ratio(log_probs, old_log_probs) * (d - 1)


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    old_log_probs: Tensor,
    estimator: KLEstimator = "k3",
    gradient: KLGradient = "ratio",
) -> Tensor:
    r"""Per-token KL term of a loss, weighted by the importance ratio or plain.

    =========  =================================  =====================================================
    estimator  ``ratio``                          ``plain``
    =========  =================================  =====================================================
    ``k1``     ``r * d``                          refused: its gradient does not contain the reference
    ``k2``     ``sg(r) * d**2 / 2``               ``d**2 / 2``, right on on-policy tokens alone
    ``k3``     ``r * k3``: :func:`kl_k3_ratio`    ``k3``: pulls towards KL(reference ‖ policy)
    =========  =================================  =====================================================

    In expectation over tokens of the policy that sampled, the gradient of each form in the column ``ratio`` is that of
    the exact KL(policy ‖ reference), before and after the policy has moved. Those of ``k2`` and ``k3`` are the same
    token by token, ``r * d`` times that of the log-prob; ``k1`` adds noise of mean zero.

    Args:
        log_probs: Of the sampled tokens under the policy now, any shape, nats.
        ref_log_probs: Same shape, under the reference.
        old_log_probs: Same shape, under the policy that sampled the tokens; no gradient.
        estimator: ``k1``, ``k2`` or ``k3``.
        gradient: ``ratio`` or ``plain``.

    Returns:
        The shape of ``log_probs``.

    Raises:
        ValueError: ``k1`` without the ratio, or an unknown name.

    >>> import torch
    >>> lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> kl_loss(lp, torch.tensor([-1.5, -1.5]), lp.detach(), "k2").sum().backward()
    >>> lp.grad
    tensor([ 0.5000, -0.5000])
    """
    if estimator not in KL_ESTIMATORS or gradient not in KL_GRADIENTS or (estimator, gradient) == ("k1", "plain"):
        raise ValueError(f"there is no KL term with estimator {estimator!r} and gradient {gradient!r}")
    if gradient == "plain":
        return (kl_k2 if estimator == "k2" else kl_k3)(log_probs, ref_log_probs)
    if estimator == "k3":
        return kl_k3_ratio(log_probs, ref_log_probs, old_log_probs)
    ratio = importance_ratio(log_probs, old_log_probs)
    if estimator == "k1":
        return ratio * kl_k1(log_probs, ref_log_probs)
    # With a gradient of its own the ratio would turn this into the gradient of E[d**2 / 2], which is not the KL.
    return ratio.detach() * kl_k2(log_probs, ref_log_probs)


def adaptive_kl_coef(
    kl_coef: float, kl: float, target: float, num_completions: int, horizon: int, max_error: float = 0.2
) -> float:
    r"""Proportional controller of the KL coefficient: up where the policy has drifted too far, down where it may go on.

    .. math:: \beta' = \beta \Bigl(1 + \mathrm{clip}\bigl(\tfrac{KL}{KL^*} - 1, -0.2, 0.2\bigr)\,\tfrac{n}{h}\Bigr)

    Source: Ziegler et al., *Fine-Tuning Language Models from Human Preferences* (arXiv 1909.08593), section 2.2.

    Args:
        kl_coef: ``beta``, positive.
        kl: Measured, in the unit of ``target``.
        target: Positive.
        num_completions: ``n``, measured over, all ranks.
        horizon: ``h``, completions over which a full error moves the coefficient by ``max_error``; at least ``n``.
        max_error: Bound of the relative error.

    >>> round(adaptive_kl_coef(0.2, kl=0.3, target=0.1, num_completions=32, horizon=1000) / 0.2, 4)
    1.0064
    >>> round(adaptive_kl_coef(0.2, kl=0.05, target=0.1, num_completions=32, horizon=1000) / 0.2, 4)
    0.9936
    """
    if not (kl_coef > 0 and target > 0 and horizon >= num_completions):
        raise ValueError(
            "kl_coef and target must be positive and horizon at least num_completions, got "
            f"kl_coef={kl_coef}, target={target}, horizon={horizon}, num_completions={num_completions}"
        )
    error = min(max(kl / target - 1.0, -max_error), max_error)
    return kl_coef * (1.0 + error * num_completions / horizon)
