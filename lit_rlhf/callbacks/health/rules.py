"""The rules that ship, and how a user's own change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lit_rlhf.callbacks.health.rule import HealthRule
from lit_rlhf.errors import ConfigurationError

DEFAULT_RULES: tuple[HealthRule, ...] = (
    # Policy and reference
    HealthRule(
        *("kl_soaring", "kl/per_token", "above", 1.0),
        "The policy is leaving the reference: raise kl_coef, lower lr, or let AdaptiveKL hold a target.",
        window=3,
    ),
    HealthRule(
        *("clipping", "policy/clip_fraction", "above", 0.3),
        "Steps are too large for the rollout they learn from: lower lr, or use fewer passes or steps_per_pass.",
        window=5,
    ),
    HealthRule(
        *("entropy_collapse", "sampling/entropy", "below", 0.2),
        "The policy has all but stopped exploring: lower lr, raise kl_coef or entropy_coef.",
        window=5,
        relative=True,
        info_when_solved=True,
    ),
    HealthRule(
        *("first_step_ratio", "policy/first_step_ratio_gap_mean", "above", 0.02),
        "Before the first step the ratio should be 1: old log-probs and the training pass disagree. Look for dropout, "
        "another temperature, or a callback that changes old_log_probs.",
    ),
    HealthRule(
        *("sampler_gap", "sampling/log_prob_gap_mean", "above", 0.05),
        "The engine's log-probs are not the trained policy's: it may sample with stale weights (staleness: 1 does), "
        "another precision, or another temperature. What is learned is then off-policy.",
    ),
    HealthRule(
        *("near_zero_loss", "loss/share", "below", 0.05),
        "This is normal: before the only step on a rollout the ratio is 1, and advantages of a group add up to 0. The "
        "gradient is not 0. Watch reward and val/ instead.",
        level="info",
        once=True,
    ),
    # Rewards and groups
    HealthRule(
        *("constant_reward", "reward/range", "below", 1e-6),
        "All completions earn the same reward, so nothing can be learned: check the reward function and the answers it "
        "is given; make the task easier or the reward finer.",
        window=3,
        info_when_solved=True,
    ),
    HealthRule(
        *("coarse_reward", "reward/between_extremes", "below", 0.01),
        "With two reward values, groups of at most four often agree by chance and then teach nothing: raise "
        "group_size, or add a finer reward.",
        window=3,
        info_when_solved=True,
    ),
    HealthRule(
        *("duplicates", "group/same_pairs", "above", 0.9),
        "Two completions of a prompt are nearly always the same: raise temperature, loosen top_p and top_k, or raise "
        "entropy_coef.",
        window=3,
        info_when_solved=True,
    ),
    HealthRule(
        *("dead_groups", "group/effective_ratio", "below", 0.5),
        "More than half of the prompts teach nothing, their completions earn the same reward: use easier (or harder) "
        "prompts, a finer reward, a larger group_size, or DynamicSampling.",
        window=5,
        info_when_solved=True,
        covered_by=("constant_reward", "duplicates"),
    ),
    HealthRule(
        *("unfilled_rollout", "group/kept", "below", 0.5),
        "DynamicSampling cannot replace the dead groups, and most of the rollout stays empty: check the reward "
        "function, use easier (or harder) prompts, or a finer reward.",
        window=3,
    ),
    HealthRule(
        *("incoherent", "sampling/entropy_while_poor", "above", 0.5),
        "Rewards stay near the worst while tokens are drawn almost at random: lower temperature.",
        window=10,
    ),
    # Completions
    HealthRule(
        *("truncation", "completion/truncated", "above", 0.3),
        "Many completions are cut at the limit and never end by themselves: raise max_new_tokens, or reward ending.",
        window=3,
    ),
    HealthRule(
        *("length_growth", "completion/length", "above", 2.0),
        "Completions have doubled in length. If the reward pays for length, limit it (a soft penalty) or normalise it; "
        "if longer reasoning is wanted, silence this rule.",
        window=5,
        relative=True,
    ),
    HealthRule(
        *("repetition", "completion/repetition", "above", 0.5),
        "Completions repeat themselves: the reward may pay for it, or the policy degenerates. Raise kl_coef, lower lr, "
        "penalise repetition.",
        window=3,
    ),
    # Critic
    HealthRule(
        *("value_blow_up", "value/error_share", "above", 3.0),
        "The critic is further off than rewards vary: lower critic_lr, lengthen critic_warmup_iterations, or lower "
        "critic_max_grad_norm.",
        window=3,
    ),
    HealthRule(
        *("harmful_critic", "value/explained_variance", "below", -0.05),
        "The critic is worse than a constant, so its advantages mislead: lengthen critic_warmup_iterations, change "
        "critic_lr, or use GRPO.",
        window=10,
        info_when_solved=True,
    ),
)


def choose_rules(
    own: Sequence[HealthRule] = (), silence: Sequence[str] = (), thresholds: Mapping[str, float] | None = None
) -> list[HealthRule]:
    """The shipped rules with a user's changes.

    Args:
        own: Further rules; one with the name of a shipped rule takes its place.
        silence: Names of rules to leave out.
        thresholds: Another threshold, by name of the rule.

    Raises:
        ConfigurationError: A name is given twice, or no rule has it.
    """
    names = [rule.name for rule in own]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigurationError(f"HealthMonitor: rules has {', '.join(sorted(twice))} more than once")
    rules = {rule.name: rule for rule in (*DEFAULT_RULES, *own)}
    for option, given in (("silence", silence), ("thresholds", thresholds or {})):
        if unknown := [name for name in given if name not in rules]:
            raise ConfigurationError(
                f"HealthMonitor: {option} names {', '.join(unknown)}, but the rules are {', '.join(rules)}"
            )
    changed = {name: replace(rules[name], threshold=value) for name, value in (thresholds or {}).items()}
    return [rule for name, rule in {**rules, **changed}.items() if name not in silence]
