"""Reward shaping: length penalties, before rewards become advantages."""

from __future__ import annotations

from collections.abc import Iterable

from rlboost.shared.job.algorithm import AlgorithmSpec
from rlboost.shared.wire.columns import I32, length


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
