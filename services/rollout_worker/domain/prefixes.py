"""Plans which slots copy keys and values from other slots instead of prefilling the same tokens again.

The samples of a group share their prompt; migrated samples have tokens of their own after it. Keys and values of a
token depend only on it and on the tokens before it, so slots with a common prefix have its keys and values in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

_MIN_SHARED = 16
"""Minimum length of a shared prefix, in tokens, unless the shorter prefix is contained whole: a shorter one is not
worth waiting for another slot's prefill."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """How one slot gets the keys and values of its prefix."""

    slot: int
    donor: int
    """The slot to copy from; -1: none."""
    shared: int
    """Number of tokens to copy; the model computes the others."""
    length: int
    """Number of tokens of the prefix."""


class _Donor(NamedTuple):
    """A slot that others may copy from."""

    turn: int
    """The turn that fills it; -1 if it is filled already."""
    slot: int
    tokens: Tokens


def plan(new: Iterable[tuple[int, Tokens]], held: Iterable[tuple[int, Tokens]]) -> list[list[Prefill]]:
    """Plan the prefill of new slots in turns: each donor is filled already, or in an earlier turn.

    Args:
        new: slots to fill, with their prefixes; empty prefixes need nothing.
        held: slots that are filled, with the tokens of their keys and values.

    """
    donors_by_start: dict[bytes, list[_Donor]] = {}
    for slot, tokens in held:
        donors_by_start.setdefault(_start(tokens), []).append(_Donor(-1, slot, tokens))
    turns: list[list[Prefill]] = []
    # Longest first: a prefix of another prefix is then copied whole.
    for slot, prefix in sorted(new, key=lambda one: -one[1].size):
        if not prefix.size:
            continue
        donors = donors_by_start.setdefault(_start(prefix), [])
        donor = max(donors, key=lambda one: (_n_common(prefix, one.tokens), -one.turn, one.slot), default=None)
        turn = donor.turn + 1 if donor else 0
        if turn == len(turns):
            turns.append([])
        shared = _n_common(prefix, donor.tokens) if donor else 0
        turns[turn].append(Prefill(slot, donor.slot if donor else -1, shared, prefix.size))
        donors.append(_Donor(turn, slot, prefix))
    return turns


def _start(tokens: Tokens) -> bytes:
    return tokens[:_MIN_SHARED].tobytes()


def _n_common(one: Tokens, other: Tokens) -> int:
    n = min(one.size, other.size)
    unequal = np.flatnonzero(one[:n] != other[:n])
    return int(unequal[0]) if unequal.size else n
