"""From rewards to advantages: per group, or per token with a critic's values. No order changes any bit of a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlboost.services.trainer.domain.rewards import all_equal

# --- From rewards and a critic's values to advantages per token, in float64 -------------------------------------------


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


# --- From rewards to advantages, on Python floats. The order of groups does not change any bit of the result ----------


_STD_EPSILON = 1e-4
"""As in TRL: bounds advantages if the deviation is tiny."""
_BATCH_EPSILON = 1e-8

Rewards = Sequence[float]


def group_standardized(rewards: Rewards) -> list[float] | None:
    """Return (r - mean) / (std + 1e-4) for each sample of one group, std with n - 1 in the denominator.

    GRPO, arXiv 2402.03300, section 4.1.2. None if all rewards are equal: such a group has no learning signal.
    """
    if all_equal(rewards):
        return None
    mean = math.fsum(rewards) / len(rewards)
    std = standard_deviation(rewards)
    return [(reward - mean) / (std + _STD_EPSILON) for reward in rewards]


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
    used = [group for group in groups if not (drop_equal and all_equal(group))]
    if kind == "batch_std":
        estimated = over_batch(used)
    elif kind == "group_mean_batch_std":
        estimated = over_batch([centered(group) for group in used])
    else:
        estimated = [_IN_GROUP[kind](group) for group in used]
    found = iter(estimated)
    return [None if drop_equal and all_equal(group) else next(found) for group in groups]


def standard_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _relative(rewards: Rewards) -> list[float]:
    return group_standardized(rewards) or [0.0] * len(rewards)


def _mean_square(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values) / len(values) if values else 0.0


_IN_GROUP: dict[str, Callable[[Rewards], list[float]]] = {
    "group_std": _relative,
    "group_mean": centered,
    "leave_one_out": leave_one_out,
    "none": lambda rewards: [0.0] * len(rewards),
}
NEED_THE_STEP = frozenset({"batch_std", "group_mean_batch_std", "gae"})
"""Estimators that need all groups of a step before the first advantage is known, so training starts late."""
