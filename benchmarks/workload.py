"""What the benchmarks run: random-weight models, prompts, and lengths that are forced on every side alike."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

PAD, EOS, FIRST_WORD = 0, 1, 2
MICRO_BATCH_TOKENS = 1536  # of the library and the floor: every work's longest group fits, so no prompt is run twice
CACHE = Path(__file__).parent / ".cache"


@dataclass(frozen=True)
class ModelShape:
    """A Llama with heads of 64.

    Args:
        hidden: Width.
        layers: Depth.
        vocabulary: ``V``.
        intermediate: Width of the feed-forward layers.
        tied: Whether embedding and head share their weights.
    """

    hidden: int
    layers: int
    vocabulary: int
    intermediate: int
    tied: bool = False


MODELS = {
    "mini": ModelShape(128, 2, 259, 352),
    "tiny": ModelShape(256, 4, 259, 720),
    "small": ModelShape(512, 8, 16_384, 1408, tied=True),
}


@dataclass(frozen=True)
class Work:
    """One training step, repeated.

    Args:
        model: Key of ``MODELS``.
        lengths: ``full`` runs every completion to the limit; ``spread`` is log-normal, median 3/8 of the limit.
        prompts: ``B``, distinct.
        group: ``G``.
        prompt_tokens: Shortest and longest prompt; lengths between them are evenly spread.
        new_tokens: Longest completion.
        kl_coef: 0 runs without a reference.
        dead_share: Share of the prompts whose completions all earn the same reward.
        algorithm: ``grpo`` or ``ppo``.
        reward_model: Score with a sequence classifier of the policy's shape instead of a rule.
        peer_micro_batch: Completions per forward and backward of the peer, the fastest one found (``--search``).
        vocabulary: Instead of the model's own.
    """

    model: str
    lengths: Literal["full", "spread"] = "spread"
    prompts: int = 8
    group: int = 8
    prompt_tokens: tuple[int, int] = (64, 128)
    new_tokens: int = 128
    kl_coef: float = 0.04
    dead_share: float = 0.0
    algorithm: Literal["grpo", "ppo"] = "grpo"
    reward_model: bool = False
    peer_micro_batch: int = 16
    vocabulary: int | None = None

    @property
    def rows(self) -> int:
        """``N``."""
        return self.prompts * self.group

    @property
    def shape(self) -> ModelShape:
        """Of the policy."""
        shape = MODELS[self.model]
        return replace(shape, vocabulary=self.vocabulary) if self.vocabulary else shape

    def prompt_ids(self) -> list[list[int]]:
        """``B`` prompts, the same in every step."""
        rng = random.Random(1)
        shortest, longest = self.prompt_tokens
        step = (longest - shortest) / max(1, self.prompts - 1)
        counts = [round(shortest + step * number) for number in range(self.prompts)]
        rng.shuffle(counts)
        return [[rng.randrange(FIRST_WORD, self.shape.vocabulary) for _ in range(count)] for count in counts]

    def completion_lengths(self) -> list[int]:
        """``N`` lengths in tokens, a prompt's together; those below the limit end with the end-of-sequence token."""
        if self.lengths == "full":
            return [self.new_tokens] * self.rows
        # The distribution's quantiles rather than draws: small N, no lucky draw.
        median, shortest = self.new_tokens * 3 / 8, max(2, self.new_tokens // 16)
        quantiles = [NormalDist().inv_cdf((row + 0.5) / self.rows) for row in range(self.rows)]
        lengths = [round(median * 2.718281828 ** (0.6 * z)) for z in quantiles]
        lengths = [min(max(length, shortest), self.new_tokens) for length in lengths]
        random.Random(2).shuffle(lengths)
        return lengths

    def data(self) -> list[dict[str, Any]]:
        """Rows of the training data: prompts as text, and what the reward needs to know."""
        dead = round(self.prompts * self.dead_share)
        return [
            {"prompt": text_of(ids), "solved": number < dead, "binary": dead > 0}
            for number, ids in enumerate(self.prompt_ids())
        ]

    def tokens(self) -> dict[str, int]:
        """Tokens of one step, prompts counted once per completion where they are trained on."""
        generated = sum(self.completion_lengths())
        prompts = sum(len(ids) for ids in self.prompt_ids()) * self.group
        return {"generated": generated, "trained": generated + prompts}

    def smaller(self) -> Work:
        """The same kind of work in seconds instead of minutes."""
        shortest, longest = self.prompt_tokens
        short = shortest // 4, longest // 4
        return replace(self, model="mini", prompt_tokens=short, new_tokens=self.new_tokens // 4, vocabulary=None)


WORKS = {
    "tiny-full": Work("tiny", "full"),
    "tiny-spread": Work("tiny"),
    "small-full": Work("small", "full", peer_micro_batch=8),
    "small-spread": Work("small", peer_micro_batch=8),
    "long": Work("tiny", prompts=4, group=16, prompt_tokens=(512, 512)),
    "dead": Work("small", kl_coef=0.0, dead_share=0.5, peer_micro_batch=8),
    "ppo-full": Work("tiny", "full", prompts=64, group=1, algorithm="ppo", reward_model=True),
    "ppo-spread": Work("tiny", prompts=64, group=1, algorithm="ppo", reward_model=True),
}


def text_of(ids: list[int]) -> str:
    """Prompt text that the tokenizer turns into exactly these ids, whatever is written behind it."""
    return "".join(f"t{token} " for token in ids)


def share_of_even(completions: list[str], **columns: Any) -> list[float]:
    """The reward: the share of even words; where the data says so it is binary, and settled for solved prompts."""
    rewards = []
    for row, text in enumerate(completions):
        words = [word for word in text.split() if word[1:].isdigit()]
        share = sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
        if columns["binary"][row]:
            share = 1.0 if columns["solved"][row] or share > 0.5 else 0.0
        rewards.append(share)
    return rewards


def model_folder(shape: ModelShape, kind: Literal["policy", "reward"] = "policy") -> str:
    """Folder with random weights and the tokenizer, made once; ``reward`` is a sequence classifier of that shape."""
    name = f"{kind}-{shape.hidden}-{shape.layers}-{shape.vocabulary}-{shape.intermediate}-{int(shape.tied)}"
    folder = CACHE / name
    if folder.exists():
        return str(folder)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    config.num_labels = 1
    making = CACHE / f"{name}.{os.getpid()}"  # two processes may make it at once; one of them wins
    model = (LlamaForCausalLM if kind == "policy" else LlamaForSequenceClassification)(config)
    model.save_pretrained(making)
    _tokenizer(shape.vocabulary).save_pretrained(making)
    if not folder.exists():
        making.rename(folder)
    return str(folder)


def make_models(work: Work) -> None:
    """All models that any side needs for this work."""
    model_folder(work.shape)
    if work.reward_model:
        model_folder(work.shape, "reward")


def _tokenizer(vocabulary: int) -> Any:
    """One word per id, so that text and ids are the same thing."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS} | {f"t{token}": token for token in range(FIRST_WORD, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
