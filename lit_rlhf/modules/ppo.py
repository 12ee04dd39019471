r"""PPO: a critic predicts the return at every token; advantages are what exceeded it.

Sources: Schulman et al. (arXiv 1707.06347), Ouyang et al. (arXiv 2203.02155). Deviations, each an option:

* the KL penalty is a reward of each token (as in the second source), not part of the loss;
* the value after the last token is 0, for truncated completions too: their outcome reward covers them, and
  bootstrapping would pay for never stopping;
* advantages are whitened over the whole rollout and all ranks, never over a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.functional.critic import (
    clipped_value_loss,
    clipped_values,
    critic_error,
    critic_moments,
    explained_variance,
)
from lit_rlhf.functional.gae import gae_advantages, masked_moments, place_outcome, reward_to_go, standardize
from lit_rlhf.functional.losses import aggregate
from lit_rlhf.models.completions import CompletionOutputs, CompletionStates
from lit_rlhf.models.forward import completion_outputs, completion_states
from lit_rlhf.models.loading import load_backbone
from lit_rlhf.models.lora import VALUE_ADAPTER, enable_gradient_checkpointing
from lit_rlhf.models.value import CRITICS, Critic, CriticKind, adapter_states, value_after_last
from lit_rlhf.modules.base import PolicyModule
from lit_rlhf.modules.pretrained import DTYPES, parameter_group
from lit_rlhf.modules.scoring import (
    by_parts,
    masked_total,
    outcome_rewards,
    penalised_token_rewards,
)
from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch


class PPOModule(PolicyModule):
    """Proximal Policy Optimization of a Hugging Face causal language model, with a critic.

    Args:
        policy: Hub name or folder of the model to train; it is the reference, too.
        critic: Where the critic's value head sits: on a backbone of its ``own``, on the policy's backbone (``shared``),
            or on a second low-rank ``adapter`` of the shared base (needs ``lora_rank``).
        critic_model: Hub name or folder of an own backbone; the policy's by default.
        critic_lr: Learning rate of the critic (of the value head alone where the backbone is shared).
        critic_max_grad_norm: Gradient-norm limit of the critic; ``null`` switches it off.
        critic_warmup_iterations: During the first iterations only the critic learns.
        value_coef: Weight of the value loss; by default 1 with an own backbone, else 0.1.
        value_clip_range: The critic's values may move this far from those of the rollout before the loss ignores it.
        gamma: Discount per token.
        gae_lambda: 1 takes the whole return for the critic's word, 0 only the next value.
        whiten_advantages: Scale advantages to mean 0 and variance 1 over the rollout.
        bootstrap_truncated: Truncated completions that were given no reward for the whole end in the critic's value.
        lr: Learning rate of the policy after warm-up.
        options: Of :class:`~lit_rlhf.modules.base.PolicyModule`: ``kl_coef``, ``kl_placement``, ``clip_range``,
            ``loss_aggregation`` and what concerns the model and the optimizer.
    """

    mean_names = ("value/loss", "value/clip_fraction", "value/mean", "value/return", "value/grad_norm")

    def __init__(
        self,
        policy: str,
        critic: CriticKind = "own",
        critic_model: str | None = None,
        critic_lr: float = 1e-5,
        critic_max_grad_norm: float | None = 1.0,
        critic_warmup_iterations: int = 0,
        value_coef: float | None = None,
        value_clip_range: float = 0.2,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        whiten_advantages: bool = True,
        bootstrap_truncated: bool = False,
        lr: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(policy, lr=lr, **options)
        check_choice("critic", critic, CRITICS)
        if critic == "adapter" and not self.lora_rank:
            raise ConfigurationError("critic='adapter' sits on the policy's frozen base: set lora_rank, too")
        if critic_model is not None and critic != "own":
            raise ConfigurationError(f"critic_model is the critic's own backbone, but critic is {critic!r}")
        check_number("gamma", gamma, minimum=0, maximum=1)
        check_number("gae_lambda", gae_lambda, minimum=0, maximum=1)
        check_number("critic_lr", critic_lr, above=0)
        check_number("critic_max_grad_norm", critic_max_grad_norm, above=0)
        check_number("value_clip_range", value_clip_range, above=0)
        check_number("value_coef", value_coef, above=0)
        check_number("critic_warmup_iterations", critic_warmup_iterations, minimum=0)
        self.critic_kind = critic
        self.critic_model = critic_model
        self.critic_lr = critic_lr
        self.critic_max_grad_norm = critic_max_grad_norm
        self.critic_warmup_iterations = critic_warmup_iterations
        self.value_coef = value_coef if value_coef is not None else 1.0 if critic == "own" else 0.1
        self.value_clip_range = value_clip_range
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.whiten_advantages = whiten_advantages
        self.bootstrap_truncated = bootstrap_truncated
        self.critic: Critic | None = None
        self._critic_moments: Tensor | None = None
        self.save_hyperparameters()
        self.save_hyperparameters(self.chosen_options)

    def build_models(self) -> None:
        """Build policy, reference and critic."""
        super().build_models()
        if self.critic is not None:
            return
        if self.critic_kind == "own":
            name, dtype = self.critic_model or self.model_name, DTYPES[self.dtype_name]
            backbone = load_backbone(name, dtype=dtype, attn_implementation=self.attn_implementation)
            if self.gradient_checkpointing:
                enable_gradient_checkpointing(backbone)
            self.critic = Critic(backbone.config.get_text_config().hidden_size, backbone)
            return
        self.critic = Critic(self.model_config.get_text_config().hidden_size)
        if self.critic_kind == "adapter":
            assert self.policy is not None
            self.add_adapter(self.policy, VALUE_ADAPTER)

    def models(self) -> list[nn.Module]:
        """Policy, reference and critic."""
        assert self.critic is not None
        backbone = [] if self.critic.backbone is None else [self.critic.backbone]
        return [*super().models(), *backbone, self.critic.head]

    def numerics_summary(self) -> str:
        """The choices that make up this objective, in one line."""
        white = "whitened" if self.whiten_advantages else "not whitened"
        critic = f"critic {self.critic_kind}, lr {self.critic_lr:g}, warm-up {self.critic_warmup_iterations} iterations"
        return f"GAE gamma {self.gamma:g}, lambda {self.gae_lambda:g}, {white}; {critic}; {super().numerics_summary()}"

    def score_rollout(self, rollout: RolloutBatch, parts: list[list[int]], ratio_is_one: bool) -> RolloutBatch:
        """Values besides the log-probs."""
        rollout = super().score_rollout(rollout, parts, ratio_is_one)
        values = by_parts(rollout, parts, self._values, extra_columns=1)
        after = value_after_last(values, rollout.completion_lengths)
        return rollout.replace(values=values[:, :-1], bootstrap_values=after)

    def compute_advantages(self, rollout: RolloutBatch) -> RolloutBatch:
        """GAE of the token rewards: step rewards and the KL penalty at their tokens, the outcome at the last."""
        assert rollout.values is not None
        assert rollout.bootstrap_values is not None
        mask = self.loss_mask(rollout)
        in_reward = self.kl_placement == "reward"
        token_rewards = penalised_token_rewards(rollout, in_reward) + place_outcome(outcome_rewards(rollout), mask)
        ends_in_value = self._bootstrapped(rollout)
        bootstrap = torch.where(ends_in_value, rollout.bootstrap_values, torch.zeros_like(rollout.bootstrap_values))
        advantages = gae_advantages(token_rewards, rollout.values, mask, self.gamma, self.gae_lambda, bootstrap)
        returns = torch.where(mask, advantages + rollout.values, torch.zeros_like(advantages))
        self._critic_moments = self.sum_over_ranks(
            critic_moments(reward_to_go(token_rewards, mask, self.gamma), rollout.values, mask)
        )
        if self.whiten_advantages:
            moments = self.sum_over_ranks(masked_moments(advantages, mask))
            advantages = standardize(advantages, mask, moments)
        return rollout.replace(advantages=advantages, returns=returns)

    def loss_mask(self, rollout: RolloutBatch) -> Tensor:
        """Tokens of rows that were scored, or that end in the critic's value."""
        return rollout.completion_mask & (rollout.scored_mask | self._bootstrapped(rollout))[:, None]

    def live_rows(self, rollout: RolloutBatch) -> Tensor:
        """The critic learns from every row."""
        return self.loss_mask(rollout).any(dim=-1)

    def forward_train(self, rows: RolloutBatch) -> CompletionOutputs:
        """Log-probs, entropies and, where the backbone is shared, the hidden states of one forward pass."""
        assert self.policy is not None
        shared = self.critic_kind == "shared"
        return completion_outputs(self.policy, rows, rows.temperature, self.entropy_mode, with_states=shared)

    def loss(self, outputs: CompletionOutputs, batch: MicroBatch) -> Tensor:
        """Clipped surrogate, plus the clipped value loss; the critic's alone during its warm-up."""
        rows = batch.rows
        assert rows.values is not None
        assert rows.returns is not None
        mask = self.loss_mask(rows)
        per_token, metrics = self.policy_loss(outputs, batch, mask)
        values = self._values(rows, outputs.states)[:, :-1]
        value_loss = clipped_value_loss(values, rows.values, rows.returns, self.value_clip_range)
        clipped = clipped_values(values, rows.values, rows.returns, self.value_clip_range)
        # Times 0 rather than left out: every parameter keeps its place in the graph, which DDP asks for.
        per_token = per_token * (0.0 if self.critic_is_warming_up else 1.0) + self.value_coef * value_loss
        self.iteration_metrics.update(
            {
                **metrics,
                "value/loss": masked_total(value_loss, mask),
                "value/clip_fraction": masked_total(clipped.float(), mask),
                "value/mean": masked_total(rows.values, mask),
                "value/return": masked_total(rows.returns, mask),
            }
        )
        return aggregate(per_token, mask, batch.denominator, self.loss_aggregation)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """During the critic's warm-up the policy does not move at all."""
        super().on_before_optimizer_step(optimizer)
        if self.critic_is_warming_up:
            for parameter in self._policy_parameters():
                parameter.grad = None

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The policy's parameters and the critic's, each with its own learning rate and gradient norm."""
        return [
            parameter_group("policy", self._policy_parameters(), self.lr, self.max_grad_norm),
            parameter_group("value", self._critic_parameters(), self.critic_lr, self.critic_max_grad_norm),
        ]

    def extra_metrics(self) -> dict[str, float]:
        """How good the critic was at rollout, against the Monte Carlo reward-to-go."""
        if self._critic_moments is None:
            return {}
        found = {
            "value/error": float(critic_error(self._critic_moments)),
            "value/explained_variance": float(explained_variance(self._critic_moments)),
        }
        return {name: value for name, value in found.items() if value == value}  # NaN is missing

    @property
    def critic_is_warming_up(self) -> bool:
        """Whether the current iteration, the last one drawn, is one of the critic's alone."""
        return self.trainer.datamodule.iteration <= self.critic_warmup_iterations  # type: ignore[attr-defined]

    def _bootstrapped(self, rollout: RolloutBatch) -> Tensor:
        given = rollout.scored_mask if rollout.outcome_mask is None else rollout.outcome_mask
        return ~rollout.finished & ~given & self.bootstrap_truncated

    def _values(self, rows: RolloutBatch, states: CompletionStates | None = None) -> Tensor:
        """``(N, T + 1)`` values before each token and after the last, from the states of the policy's pass if given."""
        assert self.critic is not None
        assert self.policy is not None
        if self.critic.backbone is not None:
            states = completion_states(self.critic.backbone, rows)
        elif self.critic_kind == "adapter":
            states = adapter_states(self.policy, rows)
        else:
            states = completion_states(self.policy, rows) if states is None else states
            if self.critic_is_warming_up:
                states = states.detach()
        return states.values(self.critic.head)

    def _policy_parameters(self) -> list[Tensor]:
        assert self.policy is not None
        return [p for name, p in self.policy.named_parameters() if f".{VALUE_ADAPTER}." not in name]

    def _critic_parameters(self) -> list[Tensor]:
        assert self.critic is not None
        assert self.policy is not None
        adapter = [p for name, p in self.policy.named_parameters() if f".{VALUE_ADAPTER}." in name]
        return [*self.critic.parameters(), *adapter]
