"""Which rows copy keys and values of other rows instead of having the model read the same tokens again.

The samples of a group share their prompt, and those that go on elsewhere have tokens of their own behind it. Keys and
values of a token depend on it and on the tokens before it, so rows that begin alike have them in common so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

_LEAST = 16
"""Rows have a beginning in common if they agree in so many tokens, or are shorter and equal: a smaller one is not worth
waiting for another row's."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How one row comes to the keys and values of its prefix."""

    row: int
    donor: int
    """The row to copy from; -1 = none."""
    shared: int
    """How many tokens it has in common with the prefix; the model reads the others."""
    length: int
    """Tokens of the prefix."""


def plan(new: Iterable[tuple[int, Tokens]], held: Iterable[tuple[int, Tokens]]) -> list[list[Reading]]:
    """Plan how new rows are read in, in turns: a donor is held, or was read in an earlier turn.

    Args:
        new: rows with their prefixes; empty ones need nothing.
        held: rows whose keys and values are there, with the tokens that they are of.

    """
    donors: dict[bytes, list[tuple[int, int, Tokens]]] = {}
    """By their beginnings: turn, row, tokens."""
    for row, tokens in held:
        donors.setdefault(_beginning(tokens), []).append((-1, row, tokens))
    turns: list[list[Reading]] = []
    # The longest first: what is the beginning of another one then needs no reading of its own.
    for row, prefix in sorted(new, key=lambda one: -one[1].size):
        if not prefix.size:
            continue
        alike = donors.setdefault(_beginning(prefix), [])
        candidates = ((_in_common(prefix, tokens), -turn, other) for turn, other, tokens in alike)
        shared, back, donor = max(candidates, default=(0, 1, -1))
        turn = 1 - back
        if turn == len(turns):
            turns.append([])
        turns[turn].append(Reading(row, donor, shared, prefix.size))
        alike.append((turn, row, prefix))
    return turns


def _beginning(tokens: Tokens) -> bytes:
    return tokens[:_LEAST].tobytes()


def _in_common(one: Tokens, other: Tokens) -> int:
    n = min(one.size, other.size)
    unequal = np.flatnonzero(one[:n] != other[:n])
    return int(unequal[0]) if unequal.size else n
