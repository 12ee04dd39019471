"""The mathematics: tensors in, tensors out, nothing but ``torch``. Every function cites its equation."""

from lit_rlhf.functional.advantages import dead_groups, group_advantages, group_std, return_to_go_advantages
from lit_rlhf.functional.bootstrap import bootstrap_interval
from lit_rlhf.functional.critic import (
    clipped_value_loss,
    clipped_values,
    critic_error,
    critic_moments,
    explained_variance,
)
from lit_rlhf.functional.gae import gae_advantages, masked_moments, place_outcome, reward_to_go, standardize
from lit_rlhf.functional.importance import sampling_weights, top_entropy_threshold
from lit_rlhf.functional.kl import adaptive_kl_coef, kl_k1, kl_k2, kl_k3, kl_k3_ratio, kl_loss
from lit_rlhf.functional.log_probs import entropy, token_log_probs
from lit_rlhf.functional.losses import (
    aggregate,
    clipped_policy_loss,
    clipped_tokens,
    clipped_weight_loss,
    importance_ratio,
    loss_denominator,
    sequence_ratio,
)
from lit_rlhf.functional.majority_vote import majority_vote
from lit_rlhf.functional.masking import (
    lengths_to_first_eos,
    mask_from_lengths,
    masked_mean,
    masked_sum,
    position_ids,
)
from lit_rlhf.functional.pass_at_k import pass_at_k
from lit_rlhf.functional.preference import bradley_terry_loss
from lit_rlhf.functional.schedules import annealed, warmup_cosine
from lit_rlhf.functional.vocabulary import hidden_log_probs

__all__ = [
    "adaptive_kl_coef",
    "aggregate",
    "annealed",
    "bootstrap_interval",
    "bradley_terry_loss",
    "clipped_policy_loss",
    "clipped_tokens",
    "clipped_value_loss",
    "clipped_values",
    "clipped_weight_loss",
    "critic_error",
    "critic_moments",
    "dead_groups",
    "entropy",
    "explained_variance",
    "gae_advantages",
    "group_advantages",
    "group_std",
    "hidden_log_probs",
    "importance_ratio",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_ratio",
    "kl_loss",
    "lengths_to_first_eos",
    "loss_denominator",
    "majority_vote",
    "mask_from_lengths",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "pass_at_k",
    "place_outcome",
    "position_ids",
    "return_to_go_advantages",
    "reward_to_go",
    "sampling_weights",
    "sequence_ratio",
    "standardize",
    "token_log_probs",
    "top_entropy_threshold",
    "warmup_cosine",
]
