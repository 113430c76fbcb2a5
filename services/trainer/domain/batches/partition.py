"""Distributes the rows of a micro-batch over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence


def partition(sizes: Sequence[int], n_parts: int) -> list[list[int]]:
    """Partition items so that the sums of the parts are close; deterministic.

    Longest item first, each to the part with the lowest sum so far (Graham's LPT rule, SIAM J. Appl. Math. 17, 1969:
    never above 4/3 of the best).

    Args:
        sizes: size of each item.
        n_parts: number of parts.

    Returns:
        The items' indices of each part, ascending; empty for some parts if there are fewer items than parts.

    """
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    sums = [0] * n_parts
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(n_parts), key=lambda part: (sums[part], len(parts[part]), part))
        parts[least].append(item)
        sums[least] += sizes[item]
    return [sorted(part) for part in parts]
