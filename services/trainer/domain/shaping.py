"""What is done to rewards before they become advantages."""

from __future__ import annotations


def overlong_penalty(n_tokens: int, max_tokens: int, fraction: float, most: float) -> float:
    """Return what a completion's length takes off its reward: DAPO's soft overlong punishment.

    arXiv 2503.14476, equation 13: nothing up to where the last `fraction` of `max_tokens` begins, then a straight line
    to `most` at `max_tokens`.

    Args:
        n_tokens: the completion's length.
        max_tokens: `sampling.max_tokens`.
        fraction: the punished part of it, above 0.
        most: the penalty at full length.

    """
    buffer = fraction * max_tokens
    return most * min(1.0, max(0.0, (n_tokens - (max_tokens - buffer)) / buffer))
