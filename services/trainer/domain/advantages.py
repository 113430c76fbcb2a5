"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EPSILON = 1e-4


def advantages(rewards: Sequence[float]) -> list[float] | None:
    """Return (r - mean) / (std + 1e-4) for each sample of one group, std with n - 1 in the denominator.

    None when all rewards are equal: such a group teaches nothing and is left out of the loss.
    """
    if min(rewards) == max(rewards):
        return None
    mean = sum(rewards) / len(rewards)
    std = standard_deviation(rewards)
    return [(reward - mean) / (std + _EPSILON) for reward in rewards]


def standard_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
