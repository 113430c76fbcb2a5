"""Reward for mathematics, checked by math-verify: `reward: {function: "rlboost.rewards.math:score"}`."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rlboost.shared.process.modules import pip_install
from rlboost.shared.user_code import describe_value, ground_truth

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
_GSM8K = "####"
"""Stands between a solution of GSM8K and its answer."""
_NULLS = frozenset({"nan", "none", "null", "<na>", "n/a", "[]", "{}", "proof", "notfound"})
"""What other tools write where a value is missing; as mathematics, these would be products of variables. The last two
are NuminaMath's, for problems without an answer."""
_WITH_EXPONENT = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}\s*")
"""A number as programs write it; as mathematics, e would be a symbol."""


def score(
    completions: Sequence[str | Sequence[Mapping[str, Any]]], *, limit_s: int = LIMIT_S, **columns: Any
) -> list[float | None]:
    r"""Return 1.0 for each completion whose answer equals the ground truth, 0.0 for any other.

    The ground truth comes from the columns that `shared.user_code.ground_truth` reads: LaTeX or plain text,
    with or without `$` or `\boxed`, or a number; of a solution as GSM8K has it, what follows the last `####`. The
    reward is None, and a line is printed, if it is something else, such as null, NaN, a list or a boolean (null also as
    text), or cannot be parsed. An answer that exceeds the limit is wrong.

    Args:
        completions: texts, or lists of messages; only the last message is checked.
        limit_s: for parsing one answer, and for comparing it.
        columns: columns of the data set, lists over the batch.

    """
    # math-verify's time limit is a signal, which only the main thread receives; other threads run without a limit.
    limit = limit_s if threading.current_thread() is threading.main_thread() else None
    _warm_up(None if limit is None else _WARM_UP_LIMIT_S)
    rewards: list[float | None] = []
    problems: set[str] = set()
    for i, completion in enumerate(completions):
        truth = ground_truth({name: values[i] for name, values in columns.items()})
        try:
            gold = _ground_truth(_text_of(truth), limit)
        except _UnusableError as error:
            problems.add(f"the ground truth {truth!r} {error}")
            rewards.append(None)
            continue
        answer = parse(
            completion if isinstance(completion, str) else str(completion[-1]["content"]), parsing_timeout=limit
        )
        rewards.append(float(verify(list(gold), answer, timeout_seconds=limit)))
    for problem in sorted(problems):
        print(f"rlboost.rewards.math: no reward: {problem}")
    return rewards


def check_row(row: Mapping[str, Any]) -> str:
    """Return why a data row gets no reward, an empty text if it may get one; `rlboost config check` shows it."""
    try:
        truth = ground_truth(row)
        _text_of(truth)
    except KeyError as error:
        return str(error.args[0])
    except _UnusableError as error:
        return f"the ground truth {describe_value(truth)} {error}"
    return ""


@lru_cache(maxsize=4096)
def _ground_truth(text: str, limit_s: int | None) -> tuple[Any, ...]:
    """Parse a ground truth, once for all completions of its group."""
    marked = text if any(delimiter in text for delimiter in _DELIMITERS) else f"\\boxed{{{text}}}"
    if not (gold := tuple(parse(marked, parsing_timeout=limit_s))):
        raise _UnusableError("cannot be parsed")  # not cached: the time limit may be the cause
    return gold


def _text_of(truth: object) -> str:
    """Return a ground truth as text."""
    if isinstance(truth, str):
        answer = truth.rpartition(_GSM8K)[2]
        if answer.strip().casefold() in _NULLS or not answer.strip(" \t\r\n#"):
            raise _UnusableError("is no answer")
        return f"{Decimal(answer.strip()):f}" if _WITH_EXPONENT.fullmatch(answer) else answer
    if isinstance(truth, int) and not isinstance(truth, bool):
        return str(truth)
    if isinstance(truth, float) and math.isfinite(truth):
        return f"{Decimal(repr(truth)):f}"  # without an exponent, whose e would be a symbol
    raise _UnusableError("is neither text nor a finite number")


class _UnusableError(Exception):
    """There is no ground truth to compare with."""


@lru_cache(maxsize=2)
def _warm_up(limit_s: int | None) -> None:
    """Parse and compare common forms of answers once, with a long limit.

    The parser takes a hundred times as long for the first expression of a form, which can exceed the usual limit on a
    busy machine.
    """
    answers = [parse(rf"\boxed{{{latex}}}", parsing_timeout=limit_s) for latex in _WARM_UP_ANSWERS]
    for answer in answers:
        verify(answers[-1], answer, timeout_seconds=limit_s)
