"""Adds up the sums that a loss function returns with each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

MAX_PREFIX = "max_"
"""Names with this prefix are maxima; all others are sums."""
MISMATCH = "mismatch_kl"
"""Sum of a KL estimate between the engine's log-probabilities of its tokens and the trainer's. Valid only if the
trainer's are computed under the weights at the start of the step."""


def add(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add the sums of a micro-batch to `total`."""
    for name, value in part.items():
        if name not in total:
            total[name] = value
        elif name.startswith(MAX_PREFIX):
            total[name] = max(total[name], value)
        else:
            total[name] += value
