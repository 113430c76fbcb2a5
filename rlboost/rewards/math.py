"""Reward for mathematics, checked by math-verify: `reward: {function: "rlboost.rewards.math:score"}`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlboost.shared.process.extras import pip_install
from rlboost.shared.user_code.reward_call import ground_truth

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError(f"mathematics is checked by math-verify: {pip_install('math')}") from error

LIMIT_S = 1
"""Time limit for parsing one answer, and for comparing it; math-verify counts whole seconds."""
_WARM_UP_LIMIT_S = 60
_WARM_UP_ANSWERS = ("7", "1.5", r"\frac{1}{2}", r"2\sqrt{3}", "x^2 + 5x - 7", "(1, 2)", "y = 3x + 2", r"\{1, 2\}")
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
"""Any of them in a text marks where its mathematics is."""


def score(
    completions: Sequence[str | Sequence[Mapping[str, Any]]], *, limit_s: int = LIMIT_S, **columns: Any
) -> list[float | None]:
    r"""Return 1.0 for each completion whose answer equals the ground truth, 0.0 for any other.

    The ground truth comes from the columns that `shared.user_code.reward_call.ground_truth` reads: LaTeX or plain text,
    with or without `$` or `\boxed`. The reward is None if it cannot be parsed. An answer that exceeds the limit is
    wrong.

    Args:
        completions: texts, or lists of messages; only the last message is checked.
        limit_s: for parsing one answer, and for comparing it.
        columns: columns of the data set, lists over the batch.

    """
    # math-verify's time limit is a signal, which only the main thread receives; other threads run without a limit.
    limit = limit_s if threading.current_thread() is threading.main_thread() else None
    _warm_up(None if limit is None else _WARM_UP_LIMIT_S)
    rewards: list[float | None] = []
    for i, completion in enumerate(completions):
        try:
            gold = _ground_truth(str(ground_truth({name: values[i] for name, values in columns.items()})), limit)
        except _UnparsableError:
            rewards.append(None)
            continue
        answer = parse(
            completion if isinstance(completion, str) else str(completion[-1]["content"]), parsing_timeout=limit
        )
        rewards.append(float(verify(list(gold), answer, timeout_seconds=limit)))
    return rewards


@lru_cache(maxsize=4096)
def _ground_truth(text: str, limit_s: int | None) -> tuple[Any, ...]:
    """Parse a ground truth, once for all completions of its group."""
    marked = text if any(delimiter in text for delimiter in _DELIMITERS) else f"\\boxed{{{text}}}"
    if not (gold := tuple(parse(marked, parsing_timeout=limit_s))):
        raise _UnparsableError  # not cached: the time limit may be the cause
    return gold


class _UnparsableError(Exception):
    """The ground truth cannot be parsed."""


@lru_cache(maxsize=2)
def _warm_up(limit_s: int | None) -> None:
    """Parse and compare common forms of answers once, with a long limit.

    The parser takes a hundred times as long for the first expression of a form, which can exceed the usual limit on a
    busy machine.
    """
    answers = [parse(rf"\boxed{{{latex}}}", parsing_timeout=limit_s) for latex in _WARM_UP_ANSWERS]
    for answer in answers:
        verify(answers[-1], answer, timeout_seconds=limit_s)
