"""Adding up the numbers that a loss function gives with each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

MOST = "most_"
"""Names that begin so are maxima; all others are sums."""
MISMATCH = "mismatch_kl"
"""Sum of a KL estimate between what the engine said of the tokens it drew and what the trainer says of them. It means
that only while the trainer's are of the weights that the step began with."""


def add(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Take a micro-batch's numbers into those of the micro-batches before it."""
    for name, value in part.items():
        if name not in total:
            total[name] = value
        elif name.startswith(MOST):
            total[name] = max(total[name], value)
        else:
            total[name] += value
