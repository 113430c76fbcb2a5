"""Sums, comparisons and shaping of rewards, the same on every platform and version of Python."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

from rlboost.shared.job.algorithm import AlgorithmSpec
from rlboost.shared.wire import I32, length

# --- Adds and compares rewards, the same on every platform and version of Python --------------------------------------
# A weighted sum of perfect rewards, such as 0.6 + 0.3 + 0.1, is 1.0 or the next lower number, depending on the order
# and on how sums are rounded. So sums are rounded once, and rewards that differ by rounding only are equal everywhere.


_TOLERANCE = 1e-9
"""Relative difference below which rewards are equal: far above rounding, far below what a reward means to say."""
_ZERO = 1e-12
"""Absolute difference below which rewards are equal: sums that cancel, such as 0.1 + 0.2 - 0.3, are not exactly 0."""
_ROUNDING = 4 * sys.float_info.epsilon
"""Part of the terms of a sum, the rounding of values, weights and products, below which the sum is 0."""


def combine(parts: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of the functions' rewards for each completion.

    A function that returned None does not apply to that completion and is left out of its sum, as in TRL. The reward is
    None if no function applies. A function of weight 0 is only logged: it does not count as one that applies. If all
    are only logged, an environment gives the rewards, and those of functions are 0.
    """
    if not any(weights):
        return [0.0] * len(parts[0])
    rewards: list[float | None] = []
    for values in zip(*parts, strict=True):
        applying = [
            value * weight for value, weight in zip(values, weights, strict=True) if value is not None and weight
        ]
        rewards.append(total(applying) if applying else None)
    return rewards


def total(terms: Sequence[float]) -> float:
    """Return a sum that is rounded once, exactly 0 if the terms cancel except for their rounding."""
    found = math.fsum(terms)
    return 0.0 if abs(found) <= _ROUNDING * math.fsum(map(abs, terms)) and len(terms) > 1 else found


def is_equal(one: float, other: float) -> bool:
    """Return True if two rewards differ by rounding only."""
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_ZERO)


def reaches(reward: float, limit: float) -> bool:
    """Return True if a reward is at least `limit`, except for rounding."""
    return reward >= limit or is_equal(reward, limit)


def all_equal(rewards: Sequence[float]) -> bool:
    """Return True if all rewards of a group are equal, except for rounding: none is better than another."""
    return is_equal(min(rewards), max(rewards))


# --- Reward shaping: length penalties, before rewards become advantages -----------------------------------------------


def length_penalties(completions: Iterable[bytes], spec: AlgorithmSpec, max_tokens: int) -> tuple[float, ...]:
    """Return the length penalty of each completion, none if the job has no penalty.

    Args:
        completions: int32 columns of token ids, of a conversation as a whole.
        spec: the job's algorithm.
        max_tokens: `sampling.max_tokens`.

    """
    fraction, most = spec.overlong_fraction, spec.overlong_penalty
    if fraction is None:
        return ()
    return tuple(overlong_penalty(length(one, I32), max_tokens, fraction, most) for one in completions)


def overlong_penalty(n_tokens: int, max_tokens: int, fraction: float, most: float) -> float:
    """Return the length penalty of a completion: DAPO's soft overlong punishment.

    arXiv 2503.14476, equation 13: 0 up to the last `fraction` of `max_tokens`, then linear, `most` at `max_tokens`.

    Args:
        n_tokens: the completion's length.
        max_tokens: `sampling.max_tokens`.
        fraction: the penalized part of `max_tokens`, above 0.
        most: the penalty at full length.

    """
    buffer = fraction * max_tokens
    return most * min(1.0, max(0.0, (n_tokens - (max_tokens - buffer)) / buffer))
