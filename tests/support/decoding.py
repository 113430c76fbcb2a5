"""A decoder for tests without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence


def decode_as_numbers(tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the token ids, separated by spaces."""
    return " ".join(map(str, tokens))
