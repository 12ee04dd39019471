"""A trained reward model as a reward function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_rlhf.data.dialogues import encode_dialogues, join_dialogue
from lit_rlhf.errors import ConfigurationError, DataError, RewardError
from lit_rlhf.functional.masking import mask_from_lengths
from lit_rlhf.models.loading import context_length, load_config, load_tokenizer
from lit_rlhf.models.scoring import load_sequence_classifier, sequence_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = ("float32", "bfloat16", "float16")


class RewardModel:
    """Scores the text of prompt and completion with a Hugging Face sequence classifier.

    The model reads text, with its own tokenizer: the policy's token ids mean nothing to it. Chat prompts are rendered
    with the reward model's own chat template; of plain strings, the completion is written behind the prompt. A
    completion that was cut off at the length limit reads like a finished one.

    The configuration is read when the object is made, the weights at the first call. A row's score is the one that
    plain transformers gives to its text alone, whatever rows it is scored with: a decoder is read at the text's last
    token that is not the padding id of the checkpoint's configuration.

    Args:
        model: Hub name or folder of the classifier.
        tokenizer: Hub name or folder of its tokenizer; that of ``model`` by default.
        chat_template: Jinja template for chat messages, instead of the tokenizer's.
        append_eos: End plain strings with the end-of-sequence token, as ``PreferenceDataModule`` does by default.
        label: Which output is the score, where the classifier has several.
        max_length: Longest text in tokens; what the model was built for by default.
        overlong: What happens to longer texts: ``error``, or ``truncate``, which cuts off their beginning.
        batch_tokens: Tokens, with padding, that are scored at once.
        device: ``auto`` is this process's accelerator, or the CPU where there is none; or any of torch's devices.
        dtype: Type of the weights: ``float32``, ``bfloat16`` or ``float16``.
        quantization: Load the weights in ``8bit`` or ``4bit`` with bitsandbytes.
        attn_implementation: Attention of transformers; its own choice by default.
        name: In logs and messages.

    Raises:
        ConfigurationError: There is no such model, it has several outputs and ``label`` says none, or an option is out
            of range.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        append_eos: bool = True,
        label: int | None = None,
        max_length: int | None = None,
        overlong: Literal["error", "truncate"] = "error",
        batch_tokens: int = 16384,
        device: str = "auto",
        dtype: str = "float32",
        quantization: Literal["8bit", "4bit"] | None = None,
        attn_implementation: str | None = None,
        name: str = "reward_model",
    ) -> None:
        for option, value, allowed in (
            ("dtype", dtype, _DTYPES),
            ("quantization", quantization, (None, "8bit", "4bit")),
            ("overlong", overlong, ("error", "truncate")),
        ):
            if value not in allowed:
                raise ConfigurationError(f"RewardModel: {option}={value!r} is not one of {allowed}")
        for option, number in (("batch_tokens", batch_tokens), ("max_length", max_length)):
            if number is not None and number < 1:
                raise ConfigurationError(f"RewardModel: {option} must be at least 1, got {number}")
        config = load_config(str(model))
        outputs: dict[Any, str] = {**(config.id2label or {})}
        if label is None and len(outputs) != 1:
            raise ConfigurationError(
                f"RewardModel: {str(model)!r} has {len(outputs)} outputs; name the score's with `label` "
                f"({', '.join(f'{key}: {value}' for key, value in outputs.items())}), or take a model that was trained "
                "to give one score"
            )
        if label is not None and not 0 <= label < len(outputs):
            raise ConfigurationError(f"RewardModel: label must lie in 0 to {len(outputs) - 1}, got {label}")
        self.model_name = str(model)
        self.tokenizer_name = str(tokenizer or model)
        self.chat_template = chat_template
        self.append_eos = append_eos
        self.label = label or 0
        self.max_length = max_length or context_length(config)
        self.overlong = overlong
        self.batch_tokens = batch_tokens
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self.attn_implementation = attn_implementation
        self.name = name
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The reward model's own tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name)
            if self.chat_template is not None:
                self._tokenizer.chat_template = self.chat_template
        return self._tokenizer

    @property
    def model(self) -> PreTrainedModel:
        """The classifier, in evaluation mode; loaded on first use."""
        if self._model is None:
            device = torch.device("cpu")
            if self.device != "auto":
                device = torch.device(self.device)
            elif torch.accelerator.is_available():
                # The process's current device: with several processes on a machine, each has its own.
                accelerator = torch.accelerator.current_accelerator()
                assert accelerator is not None
                device = torch.device(accelerator.type, torch.accelerator.current_device_index())
            model = load_sequence_classifier(
                self.model_name,
                dtype=getattr(torch, self.dtype),
                attn_implementation=self.attn_implementation,
                quantization=self.quantization,
                device=device,
            )
            if self.quantization is None:
                model.to(device)  # type: ignore[arg-type]
            self._model = model.requires_grad_(False)
        return self._model

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Score N completions.

        Args:
            prompts: N texts, or N lists of chat messages.
            completions: N texts, or N lists of messages.

        Returns:
            N scores.

        Raises:
            RewardError: A text is too long or cannot be read. Names the row, from 0.
        """
        rows = self._encode(prompts, completions)
        scores = [0.0] * len(rows)
        with torch.no_grad():
            for batch in self._batches([len(ids) for ids in rows]):
                for row, score in zip(batch, self._score([rows[row] for row in batch]), strict=True):
                    scores[row] = score
        return scores

    def _encode(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[int]]:
        dialogues = []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                dialogues.append(join_dialogue(prompt, completion))
            except DataError as error:
                raise RewardError(f"`{self.name}`: row {row}: {error}") from error
        try:
            rows = encode_dialogues(self.tokenizer, dialogues, self.append_eos)
        except DataError as error:
            raise RewardError(f"`{self.name}`: {error}") from error
        for row, ids in enumerate(rows):
            if self.max_length is not None and len(ids) > self.max_length:
                if self.overlong == "error":
                    raise RewardError(
                        f"`{self.name}`: the text of row {row} has {len(ids)} tokens, the reward model takes "
                        f"{self.max_length}; shorten prompts or completions, or set `overlong: truncate`"
                    )
                rows[row] = self._truncated(ids, self.max_length)
        return rows

    def _truncated(self, ids: list[int], limit: int) -> list[int]:
        """The text's end, which holds the completion, behind a beginning-of-sequence token if the text had one."""
        if limit > 1 and ids[0] == self.tokenizer.bos_token_id:
            return [ids[0], *ids[len(ids) - limit + 1 :]]
        return ids[len(ids) - limit :]

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Rows of similar length together, no more than ``batch_tokens`` with padding unless one row alone has more."""
        batches: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= self.batch_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        rows = [self._without_padding(ids) for ids in rows]
        pad_id = self.tokenizer.pad_token_id or 0
        width = max(len(ids) for ids in rows)
        ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], device=self.model.device)
        mask = mask_from_lengths(torch.tensor([len(row) for row in rows], device=self.model.device), width)
        values: list[float] = sequence_scores(self.model, ids, mask)[:, self.label].tolist()
        return values

    def _without_padding(self, ids: Sequence[int]) -> Sequence[int]:
        """A decoder's text up to the token that transformers reads the score at."""
        pad_id, end = self.model.config.get_text_config().pad_token_id, len(ids)
        while hasattr(self.model, "score") and end > 1 and ids[end - 1] == pad_id:
            end -= 1
        return ids[:end]
