"""From rewards to advantages, on Python floats. The order of groups does not change any bit of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_EPSILON = 1e-4
"""As in TRL: bounds advantages if the deviation is tiny."""
_BATCH_EPSILON = 1e-8

Rewards = Sequence[float]


def group_standardized(rewards: Rewards) -> list[float] | None:
    """Return (r - mean) / (std + 1e-4) for each sample of one group, std with n - 1 in the denominator.

    GRPO, arXiv 2402.03300, section 4.1.2. None if all rewards are equal: such a group has no learning signal.
    """
    if min(rewards) == max(rewards):
        return None
    mean = sum(rewards) / len(rewards)
    std = standard_deviation(rewards)
    return [(reward - mean) / (std + _EPSILON) for reward in rewards]


def centered(rewards: Rewards) -> list[float]:
    """Return r - mean for each sample of one group: Dr. GRPO, arXiv 2503.20783, section 3.2."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Rewards) -> list[float]:
    """Return r - mean of the others, for each sample of one group: RLOO, arXiv 2402.14740, section 2.2."""
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def over_batch(groups: Sequence[Rewards]) -> list[list[float]]:
    """Return (r - mean) / std over all samples of a step: REINFORCE++, arXiv 2501.03262."""
    everything = [reward for group in groups for reward in group]
    mean = math.fsum(everything) / len(everything) if everything else 0.0
    std = math.sqrt(_mean_square(everything, mean)) + _BATCH_EPSILON
    return [[(reward - mean) / std for reward in group] for group in groups]


def group_advantages(kind: str, groups: Sequence[Rewards], *, drop_equal: bool) -> list[list[float] | None]:
    """Return the advantages of groups by one of the estimators of a job file.

    Args:
        kind: `algorithm.advantage`, except `gae`. Estimators in `NEED_THE_STEP` compare across groups and need all
            groups of a step; the others work on each group alone.
        groups: the rewards of each group.
        drop_equal: whether to leave out a group whose rewards are all equal.

    Returns:
        One list per group, None for a group that is left out.

    """
    used = [group for group in groups if not (drop_equal and min(group) == max(group))]
    if kind == "batch_std":
        estimated = over_batch(used)
    elif kind == "group_mean_batch_std":
        estimated = over_batch([centered(group) for group in used])
    else:
        estimated = [_IN_GROUP[kind](group) for group in used]
    found = iter(estimated)
    return [None if drop_equal and min(group) == max(group) else next(found) for group in groups]


def standard_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _relative(rewards: Rewards) -> list[float]:
    return group_standardized(rewards) or [0.0] * len(rewards)


def _mean_square(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values) / len(values) if values else 0.0


_IN_GROUP: dict[str, Callable[[Rewards], list[float]]] = {
    "group_std": _relative,
    "group_mean": centered,
    "leave_one_out": leave_one_out,
}
NEED_THE_STEP = frozenset({"batch_std", "group_mean_batch_std", "gae"})
"""Estimators that need all groups of a step before the first advantage is known, so training starts late."""
