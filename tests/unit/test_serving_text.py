"""Text out of tokens as they come: whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.rollout_manager.domain.serving_text import BROKEN, Text


def decode(tokens: Sequence[int]) -> str:
    """One token a byte; 256 and above are special and have no text."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def shown(text: str, stops: Sequence[str] = ()) -> list[str]:
    writer = Text(decode, [65, 66], stops)
    parts = []
    for token in text.encode():
        parts.append(writer.add(token))
        if writer.stopped:
            return parts
    return [*parts, writer.end()]


@given(st.text())
def test_the_parts_make_the_text_and_none_has_half_a_character(text: str) -> None:
    parts = shown(text)
    assert "".join(parts) == text
    assert BROKEN in text or not any(BROKEN in part for part in parts)


def test_a_character_of_four_bytes_comes_with_its_last() -> None:
    assert shown("a\U0001f600b") == ["a", "", "", "", "\U0001f600", "b", ""]


def test_what_is_no_character_is_shown_in_the_end() -> None:
    writer = Text(decode, [], [])
    assert [writer.add(0xF0), writer.add(0x9F)] == ["", ""]
    assert writer.end() == BROKEN
    writer = Text(decode, [], [])
    assert sum(len(writer.add(0xF0)) for _ in range(40)) >= 32


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers(0, 3))
def test_the_text_ends_before_the_first_stop_string_wherever_tokens_end(
    text: str, stops: list[str], special: int
) -> None:
    writer = Text(decode, [65], stops)
    out, so_far = "", ""
    for char in text:
        out += "".join(writer.add(token) for token in (*[300] * special, ord(char)))
        so_far += char
        if writer.stopped:
            break
    assert writer.stopped == any(stop in so_far for stop in stops)
    out += writer.end()
    ends = [so_far.find(stop) for stop in stops if stop in so_far]
    assert out == (so_far[: min(ends)] if ends else text)
