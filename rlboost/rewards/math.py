"""Rewards for mathematics, checked by math-verify: `reward: {function: "rlboost.rewards.math:score"}`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from shared.reward_call import ground_truth

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("mathematics is checked by math-verify: pip install 'rlboost[math]'") from error

LIMIT_S = 1
"""For reading one answer, and for comparing it; math-verify counts whole seconds."""
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
    rewards: list[float | None] = []
    # A group has many completions with one answer, and comparing takes longer than reading.
    known: dict[tuple[str, str], float] = {}
    for i, completion in enumerate(completions):
        truth = str(ground_truth({name: values[i] for name, values in columns.items()}))
        gold = _truth(truth, limit)
        if not gold:
            rewards.append(None)
            continue
        text = completion if isinstance(completion, str) else str(completion[-1]["content"])
        answer = parse(text, parsing_timeout=limit)
        if not answer:
            rewards.append(0.0)
            continue
        key = truth, str(answer[-1])  # the last one is the text that was found
        if key not in known:
            known[key] = float(verify(list(gold), answer, timeout_seconds=limit))
        rewards.append(known[key])
    return rewards


@lru_cache(maxsize=1024)
def _truth(text: str, limit_s: int | None) -> tuple[Any, ...]:
    # A group's completions all have the same one.
    marked = text if any(mark in text for mark in _MARKS) else f"\\boxed{{{text}}}"
    return tuple(parse(marked, parsing_timeout=limit_s))
