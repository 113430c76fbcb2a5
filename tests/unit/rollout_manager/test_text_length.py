"""The bound by which a text is refused before it is tokenized: no text that fits exceeds it."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rlboost.services.rollout_manager.adapters.text import max_characters_per_token

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = {letter: i for i, letter in enumerate(ALPHABET)}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = {"a": 300, "aa": 301, "aaaa": 302, "\u2581": 303, "\u2581\u2581": 304, "\u1f82": 305, "<unk>": 306}
MERGES = [("a", "a"), ("aa", "aa")]


def bpe(pre_tokenizer: Any = None, normalizer: Any = None, **options: Any) -> Tokenizer:
    vocabulary = BYTES | {"aa": 301, "aaaa": 302} if "byte_fallback" not in options else FALLBACK | WORDS
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES, **options))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def word_level(unknown: str, pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "aaa": 1, " ": 2, "<unk>": 3}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def bound(tokenizer: Tokenizer) -> int | None:
    return max_characters_per_token(json.loads(tokenizer.to_str()), tokenizer.get_vocab(with_added_tokens=True))


SPLIT = pre_tokenizers.Split(Regex("a+"), "isolated")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SENTENCE = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
BOUNDED = {
    "bytes": (bpe(BYTE_LEVEL), 4),
    "bytes-composed": (bpe(pre_tokenizers.Sequence([SPLIT, BYTE_LEVEL]), normalizers.NFC()), 16),
    "byte-fallback": (bpe(None, SENTENCE, byte_fallback=True), 6),
    "words": (word_level("<none>", SPLIT), 5),
}
UNBOUNDED = {
    "unknown words are one token": word_level("<unk>", SPLIT),
    "white space vanishes": word_level("<none>", pre_tokenizers.WhitespaceSplit()),
    "a split drops text": word_level("<none>", pre_tokenizers.Split(" ", "removed")),
    "a normalizer strips": bpe(BYTE_LEVEL, normalizers.Strip()),
    "a normalizer shortens": bpe(BYTE_LEVEL, normalizers.Replace(Regex(" +"), " ")),
    "unknown characters vanish": Tokenizer(models.BPE({"a": 0}, [])),
    "unknown characters are fused": Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
    "unknown pieces are fused": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", 0.0)], 0)),
    "long words are unknown": Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1})),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.text(st.sampled_from("a \u03b1\u0313\u0300\u0345\u00e9\u6f22\U0001f600\n"), max_size=60))
def test_bound_holds_for_any_text(name: str, text: str) -> None:
    tokenizer, expected = BOUNDED[name]
    assert (limit := bound(tokenizer)) == expected
    try:
        n_tokens = len(tokenizer.encode(text).ids)
    except Exception:  # noqa: BLE001 - the library raises no other: the text has no tokens
        return
    assert len(text) <= n_tokens * limit


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizer_whose_tokens_stand_for_any_length_has_no_bound(name: str) -> None:
    assert bound(UNBOUNDED[name]) is None


def test_special_token_that_takes_white_space_leaves_no_bound() -> None:
    tokenizer = bpe(BYTE_LEVEL)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [{"content": "<end>", "lstrip": False, "rstrip": True}]
    assert max_characters_per_token(document, tokenizer.get_vocab()) is None


def test_unicode_composes_at_most_four_characters_to_one() -> None:
    characters = (chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    assert max(len(unicodedata.normalize("NFD", each)) for each in characters) == 4
