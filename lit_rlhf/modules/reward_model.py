"""A reward model, trained on pairs of answers of which people preferred one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional.preference import bradley_terry_loss
from lit_rlhf.models.scoring import load_sequence_classifier, sequence_scores
from lit_rlhf.modules.pretrained import DTYPES, PretrainedModule, parameter_group


class RewardModelModule(PretrainedModule):
    r"""Bradley-Terry training of a sequence classifier with one output, the score of a whole text.

    .. math:: L = \frac{1}{N} \sum_i -\log\sigma(r^c_i - r^r_i) + \frac{c}{N} \sum_i (r^c_i + r^r_i)^2

    over the N pairs of the batch. The first term leaves the scores' common offset free; the second, with the small
    coefficient :math:`c`, pulls it to zero (Eisenstein et al., *Helping or Herding?*, arXiv 2312.09244).

    The score is read at the last token of the text, whatever id pads the batch.

    Args:
        model: Hub name or folder of the model to start from: a causal language model, which gets a new score head, or
            a sequence classifier with one output. Its tokenizer comes from the same place.
        lr: Learning rate after warm-up.
        center_coef: Coefficient :math:`c`, not negative.
        options: Of :class:`~lit_rlhf.modules.pretrained.PretrainedModule`: what concerns the model and the optimizer.
    """

    def __init__(self, model: str, lr: float = 1e-5, center_coef: float = 0.0, **options: Any) -> None:
        super().__init__(model, lr=lr, **options)
        if not center_coef >= 0.0:
            raise ConfigurationError(f"center_coef must not be negative, got {center_coef}")
        self.center_coef = center_coef
        self.model: nn.Module | None = None
        # Sums and counts of pairs, so that batches and ranks of any size give the mean over all pairs.
        self.val_loss = MeanMetric(nan_strategy="disable")
        self.val_accuracy = MeanMetric(nan_strategy="disable")
        self.val_margin = MeanMetric(nan_strategy="disable")

    @property
    def trained_model(self) -> nn.Module | None:
        """The sequence classifier."""
        return self.model

    def build_models(self) -> None:
        """Build the classifier, once; Lightning calls this at the start of fit and validate."""
        if self.model is not None:
            return
        model = load_sequence_classifier(
            self.model_name,
            num_labels=1,
            dtype=DTYPES[self.dtype_name],
            attn_implementation=self.attn_implementation,
        )
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # transformers' forward takes the last id that differs from this one for the end of the text. Where the token
        # that ends texts also pads, the exported model has none: it scores single texts right and refuses padded ones.
        pad_id = self.tokenizer.pad_token_id
        config = model.config.get_text_config()
        config.pad_token_id = pad_id if pad_id != self.tokenizer.eos_token_id else None
        self.model = model.train()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All of the classifier's parameters in one group."""
        assert self.model is not None
        return [parameter_group("reward_model", self.model.parameters(), self.lr, self.max_grad_norm)]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores of whole texts.

        Args:
            input_ids: ``(N, L)`` int64, padded on the right.
            attention_mask: ``(N, L)`` bool, True = a real token.

        Returns:
            ``(N,)`` float32.
        """
        assert self.model is not None
        return sequence_scores(self.model, input_ids, attention_mask)[:, 0]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the batch's pairs, in nats."""
        chosen, rejected = self._scores(batch)
        loss = bradley_terry_loss(chosen, rejected).mean()
        self.log("train/loss", loss, prog_bar=True, batch_size=len(chosen))
        self.log("train/accuracy", _wins(chosen, rejected).mean(), batch_size=len(chosen))
        if self.center_coef > 0.0:
            loss = loss + self.center_coef * (chosen + rejected).square().mean()
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Loss without centring (nats), share of pairs in the right order (ties count half), difference of scores."""
        chosen, rejected = self._scores(batch)
        self.val_loss.update(bradley_terry_loss(chosen, rejected))
        self.val_accuracy.update(_wins(chosen, rejected))
        self.val_margin.update(chosen - rejected)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/accuracy", self.val_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/margin", self.val_margin, on_step=False, on_epoch=True)

    def _scores(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected texts, ``(N,)`` each, from one forward pass."""
        ids = torch.cat([batch["chosen_ids"], batch["rejected_ids"]])
        mask = torch.cat([batch["chosen_mask"], batch["rejected_mask"]])
        chosen, rejected = self(ids, mask).chunk(2)
        return chosen, rejected


def _wins(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where the chosen text has the higher score, 0 where it has the lower one, 1/2 where they tie."""
    return ((chosen > rejected).float() + (chosen >= rejected).float()) / 2
