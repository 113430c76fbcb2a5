"""The reward: the task's own scorer, from 0 to 1."""

from __future__ import annotations

from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

scorer = cache(reasoning_gym.get_score_answer_fn)


def score(
    completions: list[str | list[dict[str, Any]]],
    *,
    task: list[str],
    question: list[str],
    answer: list[str],
    metadata: list[dict[str, Any]],
    **columns: object,
) -> list[float]:
    """Return one reward per completion: of the text between the tags, or of all text after a bare question."""
    return [
        float(scorer(name)(_answer(text), {"question": asked, "answer": right, "metadata": about}))
        for text, name, asked, right, about in zip(completions, task, question, answer, metadata, strict=True)
    ]


def _answer(completion: str | list[dict[str, Any]]) -> str | None:
    return completion.strip() if isinstance(completion, str) else extract_answer(completion[-1]["content"])
