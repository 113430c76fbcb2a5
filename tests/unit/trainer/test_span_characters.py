from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

from rlboost.services.trainer.step.texts import span_characters

TEXTS = {0: "", 1: "a", 2: "bc", 3: "def"}
"""Token 0 is special."""


def decode(tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
    assert skip_special_tokens
    return "".join(TEXTS[token] for token in tokens)


def test_span_characters_add_up_to_the_completion_without_special_tokens() -> None:
    spans = [("w-1", 0, 2), ("w-2", 0, 1), ("w-1", 1, 2)]
    found = span_characters([1, 2, 3, 2, 0], spans, Mock(decode=decode))
    assert found == {"span_characters": [3, 3, 2]}


def test_span_characters_of_one_span_are_left_out() -> None:
    assert span_characters([1, 2], [("w-1", 0, 2)], Mock(decode=decode)) == {}
