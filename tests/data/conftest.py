from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<system>", "<assistant>", "<end>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] }}{{ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """A tokenizer with one token per byte, built on the spot."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(
        *, bos: bool = False, eos: bool = False, pad: str | None = "<pad>", template: str | None = TEMPLATE
    ) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate(SPECIALS + alphabet)}
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
        if bos or eos:
            single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
            inner.post_processor = processors.TemplateProcessing(
                single=single, special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token=pad, chat_template=template
        )

    return make
