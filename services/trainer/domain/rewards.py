"""Several reward functions' answers made one reward a completion."""

from __future__ import annotations

from collections.abc import Sequence


def combine(parts: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of what each function said of each completion.

    A function that gave None does not apply to that completion and is left out of its sum, as in TRL; where none
    applies there is no reward, None.
    """
    rewards: list[float | None] = []
    for values in zip(*parts, strict=True):
        applying = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
        rewards.append(sum(applying) if applying else None)
    return rewards
