"""Combines the rewards of several functions into one per completion."""

from __future__ import annotations

from collections.abc import Sequence


def combine(parts: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of the functions' rewards for each completion.

    A function that returned None does not apply to that completion and is left out of its sum, as in TRL. The reward is
    None if no function applies.
    """
    rewards: list[float | None] = []
    for values in zip(*parts, strict=True):
        applying = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
        rewards.append(sum(applying) if applying else None)
    return rewards
