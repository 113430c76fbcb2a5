"""The reward: 1 if the first number of a completion is the answer."""

from __future__ import annotations

import re


def score(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], *, answer: list[str], **columns: object
) -> list[float]:
    """Return one reward per completion; `answer` is that column of train.jsonl, one value per completion."""
    return [float(first_number(text) == right) for text, right in zip(completions, answer, strict=True)]


def first_number(text: str) -> str | None:
    """Return the number that a completion begins with, None if it begins with anything else."""
    found = re.match(r"\s*(\d+)", text)
    return found[1] if found else None
