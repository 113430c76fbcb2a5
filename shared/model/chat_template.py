"""Finds the text that a chat template renders after an answer, without giving it the answer."""

from __future__ import annotations

ANSWER_PLACEHOLDER = "\ue000answer\ue000"
"""Takes the place of an answer in a template; uses a private-use character that no text contains."""


def text_after_answer(rendered: str, end: str) -> str | None:
    """Return the text after the answer in a rendered conversation; None if the answer is not rendered exactly once.

    Args:
        rendered: the conversation, with `ANSWER_PLACEHOLDER` as the answer.
        end: the stop token that the model has generated, as text; it is not repeated. Empty if there is none.

    """
    _, *suffixes = rendered.split(ANSWER_PLACEHOLDER)
    if len(suffixes) != 1:
        return None
    (suffix,) = suffixes
    stripped = suffix.lstrip()
    return stripped.removeprefix(end) if end and stripped.startswith(end) else suffix
