"""Sharing out the rows of one micro-batch among processes that compute at the same time."""

from __future__ import annotations

from collections.abc import Sequence


def spread(sizes: Sequence[int], n_parts: int) -> list[list[int]]:
    """Share out items so that the parts' sums are close; the same sizes give the same parts.

    The longest item first, each to the part with the least so far (Graham's LPT rule, SIAM J. Appl. Math. 17, 1969:
    never above 4/3 of the best).

    Args:
        sizes: of the items.
        n_parts: how many parts.

    Returns:
        For each part the items' indices, ascending; empty where there are fewer items than parts.

    """
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    sums = [0] * n_parts
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(n_parts), key=lambda part: (sums[part], len(parts[part]), part))
        parts[least].append(item)
        sums[least] += sizes[item]
    return [sorted(part) for part in parts]
