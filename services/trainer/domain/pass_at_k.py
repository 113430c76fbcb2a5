"""pass@k: the probability that at least one of k completions of a problem passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, n_passed: int, k: int) -> float:
    """Return the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    Args:
        n: number of completions, at least `k`.
        n_passed: number of completions that passed (c).
        k: number of attempts, at least 1.

    Raises:
        ValueError: `k` is below 1 or above `n`.

    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} completions")
    return 1.0 - comb(n - n_passed, k) / comb(n, k)


def pass_rates(problems: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Return k -> the mean of pass@k over problems, for k = 1, 2, 4, 8, ... up to the fewest completions of a problem.

    Args:
        problems: for each problem, whether each of its completions passed; at least one completion per problem.

    """
    if not problems:
        return {}
    fewest = min(map(len, problems))
    return {
        k: sum(pass_at_k(len(passed), sum(passed), k) for passed in problems) / len(problems)
        for k in (1 << i for i in range(fewest.bit_length()))
    }
