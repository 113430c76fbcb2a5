"""Rewards for mathematics, checked by math-verify: `reward: {function: "rlboost.rewards.math:score"}`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from shared.reward_call import ground_truth

try:
    from rlboost.rewards.math_answers import Answer, equal, read, warm
except ImportError as error:
    raise ImportError("mathematics is checked by math-verify: pip install 'rlboost[math]'") from error

LIMIT_S = 1
"""For reading one answer, and for comparing it; math-verify counts whole seconds."""
_WARM_LIMIT_S = 60
_MARKS = ("$", "\\boxed", "\\(", "\\[")
"""One of them in a text says where its mathematics is."""


def score(
    completions: Sequence[str | Sequence[Mapping[str, Any]]], *, limit_s: int = LIMIT_S, **columns: Any
) -> list[float | None]:
    r"""Return 1.0 for each completion whose answer equals what is right, 0.0 for another or none.

    What is right is in the columns where `shared.reward_call.ground_truth` looks for it: LaTeX or plain, with or
    without `$` or `\boxed`. None where nothing can be read there. An answer that takes longer than the limit is wrong.

    Args:
        completions: texts, or lists of messages, of which the last counts.
        limit_s: for reading one answer, and for comparing it.
        columns: the data's, lists over the batch.

    """
    # math-verify's clock is a signal, which only the main thread gets; elsewhere the caller has to have a clock.
    limit = limit_s if threading.current_thread() is threading.main_thread() else None
    warm(None if limit is None else _WARM_LIMIT_S)
    rewards: list[float | None] = []
    # Also what takes long, of which nothing is remembered beyond this group.
    known: dict[tuple[Answer, Answer], float] = {}
    for i, completion in enumerate(completions):
        gold = _right(str(ground_truth({name: values[i] for name, values in columns.items()})), limit)
        if gold is None:
            rewards.append(None)
            continue
        answer = read(completion if isinstance(completion, str) else str(completion[-1]["content"]), limit)
        if answer is None:
            rewards.append(0.0)
            continue
        if (gold, answer) not in known:
            known[gold, answer] = float(equal(gold, answer, limit))
        rewards.append(known[gold, answer])
    return rewards


def _right(text: str, limit_s: int | None) -> Answer | None:
    try:
        return _read_right(text, limit_s)
    except _Unreadable:
        return None


@lru_cache(maxsize=4096)
def _read_right(text: str, limit_s: int | None) -> Answer:
    # A group's completions all have the same one.
    marked = text if any(mark in text for mark in _MARKS) else f"\\boxed{{{text}}}"
    if (answer := read(marked, limit_s)) is None:
        raise _Unreadable  # is not remembered: it may have been the time limit
    return answer


class _Unreadable(Exception):
    """Nothing can be read in what is to be right."""
