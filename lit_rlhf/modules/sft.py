"""Supervised fine-tuning: the model that reinforcement learning starts from."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import MeanMetric

from lit_rlhf.functional.log_probs import token_log_probs
from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.modules.causal_lm import CausalLMModule


class SFTModule(CausalLMModule):
    r"""Next-token cross-entropy on the completions; prompts are context only.

    .. math:: L = -\frac{1}{\sum_{i,t} m_{it}} \sum_{i,t} m_{it} \log\pi(y_{it} \mid y_{i,<t})

    with :math:`m` the completion mask. The denominator is the number of completion tokens in the *batch*: with
    ``accumulate_grad_batches`` or several ranks the step's gradient is the mean of its batches' means, so a token in a
    batch of short completions weighs a little more than one in a batch of long ones. Give the whole step to one batch
    where that matters.

    Args:
        policy: Hub name or folder of the model to train. Its tokenizer comes from the same place.
        lr: Learning rate after warm-up.
        options: Of :class:`~lit_rlhf.modules.causal_lm.CausalLMModule`: what concerns the model and the optimizer.
    """

    def __init__(self, policy: str, lr: float = 2e-5, **options: Any) -> None:
        super().__init__(policy, lr=lr, **options)
        # Sums and counts of tokens, so that batches and ranks of any size give the mean over all tokens.
        self.val_loss = MeanMetric(nan_strategy="disable")
        self.val_token_accuracy = MeanMetric(nan_strategy="disable")
        self.save_hyperparameters()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of the token that follows each position.

        Args:
            input_ids: ``(N, L)`` int64, padded on the right.
            attention_mask: ``(N, L)`` bool, True = a real token.

        Returns:
            ``(N, L, V)``.
        """
        assert self.policy is not None
        return self.policy(input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False).logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy over the batch's completion tokens, in nats; exactly 0 if there are none."""
        targets, mask, logits = self._predict(batch)
        tokens = mask.sum()
        loss = -masked_sum(token_log_probs(logits, targets), mask) / tokens.clamp(min=1)
        self.log("train/loss", loss, prog_bar=True, batch_size=int(tokens))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Cross-entropy (nats) and share of tokens that greedy decoding would get right, given the true ones before."""
        targets, mask, logits = self._predict(batch)
        self.val_loss.update(-token_log_probs(logits, targets)[mask])
        self.val_token_accuracy.update((logits.argmax(dim=-1) == targets)[mask].float())
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/token_accuracy", self.val_token_accuracy, on_step=False, on_epoch=True)

    def _predict(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Targets ``(N, L-1)``, their mask ``(N, L-1)`` and the logits that predict them ``(N, L-1, V)``."""
        logits = self(batch["input_ids"], batch["attention_mask"])[:, :-1]
        return batch["input_ids"][:, 1:], batch["completion_mask"][:, 1:], logits
