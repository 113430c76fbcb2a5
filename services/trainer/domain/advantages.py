"""Rewards, and from rewards to advantages: per group, or per token with a critic's values.

Sums and comparisons are the same on every platform and version of Python; no order changes any bit of a result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlboost.shared.job.algorithm import AlgorithmSpec
from rlboost.shared.wire import I32, length

# --- Adds and compares rewards, the same on every platform and version of Python --------------------------------------
# A weighted sum of perfect rewards, such as 0.6 + 0.3 + 0.1, is 1.0 or the next lower number, depending on the order
# and on how sums are rounded. So sums are rounded once, and rewards that differ by rounding only are equal everywhere.


_TOLERANCE = 1e-9
"""Relative difference below which rewards are equal: far above rounding, far below what a reward means to say."""
_ZERO = 1e-12
"""Absolute difference below which rewards are equal: sums that cancel, such as 0.1 + 0.2 - 0.3, are not exactly 0."""
_ROUNDING = 4 * sys.float_info.epsilon
"""Part of the terms of a sum, the rounding of values, weights and products, below which the sum is 0."""


def combine(parts: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of the functions' rewards for each completion.

    A function that returned None does not apply to that completion and is left out of its sum, as in TRL. The reward is
    None if no function applies. A function of weight 0 is only logged: it does not count as one that applies. If all
    are only logged, an environment gives the rewards, and those of functions are 0.
    """
    if not any(weights):
        return [0.0] * len(parts[0])
    rewards: list[float | None] = []
    for values in zip(*parts, strict=True):
        applying = [
            value * weight for value, weight in zip(values, weights, strict=True) if value is not None and weight
        ]
        rewards.append(total(applying) if applying else None)
    return rewards


def total(terms: Sequence[float]) -> float:
    """Return a sum that is rounded once, exactly 0 if the terms cancel except for their rounding."""
    found = math.fsum(terms)
    return 0.0 if abs(found) <= _ROUNDING * math.fsum(map(abs, terms)) and len(terms) > 1 else found


def is_equal(one: float, other: float) -> bool:
    """Return True if two rewards differ by rounding only."""
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_ZERO)


def reaches(reward: float, limit: float) -> bool:
    """Return True if a reward is at least `limit`, except for rounding."""
    return reward >= limit or is_equal(reward, limit)


def all_equal(rewards: Sequence[float]) -> bool:
    """Return True if all rewards of a group are equal, except for rounding: none is better than another."""
    return is_equal(min(rewards), max(rewards))


# --- Reward shaping: length penalties, before rewards become advantages -----------------------------------------------


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
