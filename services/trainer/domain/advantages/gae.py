"""From rewards and a critic's values to advantages per token, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
"""A column with one entry per completion token."""

_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Experience:
    """One completion, without advantages."""

    reward: float
    values: Array
    """The critic's value before each token, [tokens]."""
    penalties: Array | None = None
    """Penalty subtracted from each token's reward, [tokens]; None: no penalty."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages and critic targets of a step, one column per completion."""

    advantages: list[Array]
    """Whitened over all tokens of the step."""
    returns: list[Array]
    """The critic's targets: advantages before whitening, plus values."""
    advantage_mean: float
    """Mean over tokens, before whitening."""
    advantage_std: float
    explained_variance: float
    """Explained variance of the returns by the values: 1 for a perfect critic, 0 for a constant one."""


def token_rewards(reward: float, n_tokens: int, penalties: Array | None = None) -> Array:
    """Return each token's reward: the completion's reward at its last token, minus penalties, [n_tokens].

    As in InstructGPT, arXiv 2203.02155, equation 2, with log p - log p_start times a coefficient as the penalty.
    """
    rewards = np.zeros(n_tokens)
    rewards[-1] = reward
    return rewards if penalties is None else rewards - penalties


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """Return the advantage of each token of one completion, whose last token ends the episode.

    Generalized advantage estimation, arXiv 1506.02438, equation 16: the sum over l of (gamma lam)^l delta_(t+l), with
    delta_t = r_t + gamma V_(t+1) - V_t, and V = 0 after the end.

    Args:
        rewards: reward of each token, [tokens].
        values: the critic's value before each token, [tokens].
        gamma: discount per token.
        lam: 0 for one-step advantages, 1 for Monte Carlo returns.

    """
    deltas = rewards - values
    deltas[:-1] += gamma * values[1:]
    found, after = [0.0] * len(deltas), 0.0
    for place, delta in zip(range(len(deltas) - 1, -1, -1), reversed(deltas.tolist()), strict=True):
        found[place] = after = delta + gamma * lam * after
    return np.asarray(found)


def gae_advantages(step: Sequence[Experience], gamma: float, lam: float) -> Estimate:
    """Return the advantages and returns of a step. The order of completions does not change any bit of them.

    Advantages are whitened over the step's tokens: (a - mean) / std, as in common PPO implementations.
    """
    raw = [gae(token_rewards(one.reward, len(one.values), one.penalties), one.values, gamma, lam) for one in step]
    returns = [advantages + one.values for advantages, one in zip(raw, step, strict=True)]
    mean, std = _moments(raw)
    # Returns minus values are the advantages, so their variance is what the values do not explain.
    unexplained, spread = std**2, _moments(returns)[1] ** 2
    return Estimate(
        advantages=[(advantages - mean) / (std + _EPSILON) for advantages in raw],
        returns=returns,
        advantage_mean=mean,
        advantage_std=std,
        explained_variance=1.0 - unexplained / spread if spread else 0.0,
    )


def metrics(found: Estimate) -> dict[str, float]:
    """Return the metrics of a step."""
    return {
        "advantage/mean": found.advantage_mean,
        "advantage/std": found.advantage_std,
        "value/explained_variance": found.explained_variance,
    }


def _moments(columns: Sequence[Array]) -> tuple[float, float]:
    """Return mean and standard deviation over all entries, with exactly rounded sums, independent of the order."""
    n = sum(map(len, columns))
    if not n:
        return 0.0, 0.0
    mean = math.fsum(value for column in columns for value in column.tolist()) / n
    square = math.fsum(value for column in columns for value in np.square(column - mean).tolist())
    return mean, math.sqrt(square / n)
