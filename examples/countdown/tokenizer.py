"""The tokenizer: 128 whole tokens, each number 0..99 one of them; encoding and decoding give the text back exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlboost.examples.countdown.task import BOS, EOS, PAD, VOCABULARY

MAX_LENGTH = 512


def build(vocabulary: Sequence[str] = VOCABULARY) -> Tokenizer:
    """Return the tokenizer: the longest entry that fits, from left to right; `<bos>` in front as a special token.

    There is no unknown token: text that the vocabulary cannot spell is an error, not a guess.
    """
    tokenizer = Tokenizer(models.WordLevel({text: token_id for token_id, text in enumerate(vocabulary)}))
    longest_first = sorted(vocabulary, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary.index(BOS))]
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def pretrained(vocabulary: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the form that Hugging Face directories hold."""
    return PreTrainedTokenizerFast(
        tokenizer_object=build(vocabulary),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
