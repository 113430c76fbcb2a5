"""The streaming detokenizer: whole characters only, and no text from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.serving.text import REPLACEMENT_CHARACTER, Detokenizer


def decode(tokens: Sequence[int]) -> str:
    """One token a byte; 256 and above are special and have no text."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def shown(text: str, size: int = 1) -> list[str]:
    detokenizer = Detokenizer(decode, [65, 66], ())
    tokens = text.encode()
    parts = [detokenizer.add(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    return [*parts, detokenizer.flush()]


@given(st.text(), st.integers(1, 40))
def test_detokenizer_yields_whole_characters_only(text: str, size: int) -> None:
    parts = shown(text, size)
    assert "".join(parts) == text
    assert REPLACEMENT_CHARACTER in text or not any(REPLACEMENT_CHARACTER in part for part in parts)


def test_detokenizer_yields_a_character_with_its_last_byte() -> None:
    assert shown("a\U0001f600b") == ["a", "", "", "", "\U0001f600", "b", ""]
    assert shown("abcdefghij\U0001f600b", 12) == ["abcdefghij", "\U0001f600b", ""]


def test_detokenizer_yields_invalid_bytes_at_the_end() -> None:
    detokenizer = Detokenizer(decode, [], [])
    assert [detokenizer.add([0xF0]), detokenizer.add([0x9F])] == ["", ""]
    assert detokenizer.flush() == REPLACEMENT_CHARACTER
    detokenizer = Detokenizer(decode, [], [])
    assert sum(len(detokenizer.add([0xF0])) for _ in range(40)) >= 32


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers(0, 3))
def test_detokenizer_ends_before_the_first_stop_string(text: str, stops: list[str], special: int) -> None:
    detokenizer = Detokenizer(decode, [65], stops)
    out, so_far = "", ""
    for char in text:
        out += "".join(detokenizer.add([token]) for token in (*[300] * special, ord(char)))
        so_far += char
        if detokenizer.stopped:
            break
    assert detokenizer.stopped == any(stop in so_far for stop in stops)
    out += detokenizer.flush()
    ends = [so_far.find(stop) for stop in stops if stop in so_far]
    assert out == (so_far[: min(ends)] if ends else text)
