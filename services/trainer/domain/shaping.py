"""What is done to rewards before they become advantages."""

from __future__ import annotations

from services.trainer.domain.metrics import ScoredGroup
from shared.algorithm import AlgorithmSpec
from shared.columns import I32, length


def shaped(group: ScoredGroup, spec: AlgorithmSpec, max_tokens: int) -> list[float]:
    """Return the rewards of a group's samples as they are trained on; `max_tokens` is `sampling.max_tokens`."""
    taken = penalties(group, spec, max_tokens) or [0.0] * len(group.rewards)
    return [reward - penalty for reward, penalty in zip(group.rewards, taken, strict=True)]


def penalties(group: ScoredGroup, spec: AlgorithmSpec, max_tokens: int) -> list[float]:
    """Return what each sample's length takes off its reward, nothing where the job punishes no length."""
    fraction, most = spec.overlong_fraction, spec.overlong_penalty
    if fraction is None:
        return []
    # Of a conversation everything counts, as for the limit.
    completions = [talk.completion for talk in group.talks] or [sample.tokens for sample in group.samples]
    return [overlong_penalty(length(one, I32), max_tokens, fraction, most) for one in completions]


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
