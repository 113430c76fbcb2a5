"""The reward: 1 if the first number of a completion is the answer."""

from __future__ import annotations

import re


def score(
    prompts: list[str],
    completions: list[str],
    completion_ids: list[list[int]],
    *,
    answer: list[str | int | None],
    **columns: object,
) -> list[float | None]:
    """Return one reward per completion; `answer` is that column of train.jsonl, one value per completion.

    None means that there is no reward: the row has no answer.
    """
    return [
        None if right is None else float(first_number(text) == str(right))
        for text, right in zip(completions, answer, strict=True)
    ]


def first_number(text: str) -> str | None:
    """Return the number that a completion begins with, None if it begins with anything else."""
    found = re.match(r"\s*(\d+)", text)
    return found[1] if found else None
