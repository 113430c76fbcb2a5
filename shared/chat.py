"""What a chat template writes behind an answer, found without showing it the answer."""

from __future__ import annotations

STAND_IN = "\ue000answer\ue000"
"""Stands for an answer's text in a template; of characters that no text has."""


def behind_answer(rendered: str, end: str) -> str | None:
    """Return what stands behind the one answer in a rendered conversation, None if it is not there once, as it is.

    Args:
        rendered: the conversation, with `STAND_IN` for the answer.
        end: the token with which the model has ended the answer itself, empty if it has not: it is left out.

    """
    _, *behind = rendered.split(STAND_IN)
    if len(behind) != 1:
        return None
    rest = behind[0]
    return rest.lstrip().removeprefix(end) if end and rest.lstrip().startswith(end) else rest
