"""Reward shaping: length penalties, before rewards become advantages."""

from __future__ import annotations

from rlboost.services.trainer.domain.groups.scored_group import ScoredGroup
from rlboost.shared.job.algorithm import AlgorithmSpec
from rlboost.shared.wire.columns import I32, length


def shaped_rewards(group: ScoredGroup, spec: AlgorithmSpec, max_tokens: int) -> list[float]:
    """Return the rewards of a group's samples minus length penalties; `max_tokens` is `sampling.max_tokens`."""
    taken = length_penalties(group, spec, max_tokens) or [0.0] * len(group.rewards)
    return [reward - penalty for reward, penalty in zip(group.rewards, taken, strict=True)]


def length_penalties(group: ScoredGroup, spec: AlgorithmSpec, max_tokens: int) -> list[float]:
    """Return the length penalty of each sample, of a conversation as a whole; an empty list if the job has none."""
    fraction, most = spec.overlong_fraction, spec.overlong_penalty
    if fraction is None:
        return []
    return [overlong_penalty(length(one, I32), max_tokens, fraction, most) for one in group.completions]


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
