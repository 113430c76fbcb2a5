"""A KV cache that is a rectangle: one column a token, and all rows as wide as the longest needs.

A row counts with the length at which it ends at the latest, so whatever was let in can run to its end.
"""

from __future__ import annotations

QUANTUM = 16
"""Columns come in multiples of this: kernels want aligned masks, and neighbouring lengths come out equal."""


def round_up(length: int) -> int:
    """Return the columns that so many tokens take."""
    return -(-length // QUANTUM) * QUANTUM


def rows_in(tokens: int, longest: int) -> int:
    """Return how many rows a cache of so many tokens holds, of which the longest ends at this length."""
    return tokens // max(QUANTUM, round_up(longest))
