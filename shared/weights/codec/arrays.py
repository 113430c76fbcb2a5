"""The arrays that the codec's kernels exchange."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint8]
"""A bit stream: bit i is bit i % 8 of byte i // 8. Sections are padded with zeros to whole words of 8 bytes."""
Positions = NDArray[np.uint32]
"""Ascending, without doubles."""
Magnitudes = NDArray[np.uint32]
"""Of steps beyond 1: the step's absolute value less 2."""
Values = NDArray[Any]
"""Bit patterns of weights: uint16 or uint32 (uint8 where they have no steps)."""
Steps = NDArray[Any]
"""Differences of ordered integers, modulo their range: int16 or int32, never zero."""

VALUE_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
STEP_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}

N_CLASSES = 8


class Params(NamedTuple):
    """What precedes the sections; all lengths are bytes."""

    k: int = 0
    escape_k: int = 0
    magnitude_k: int = 0
    unary_bytes: int = 0
    """Of the positions; of a bitmap delta the bitmap."""
    n_escapes: int = 0
    escape_unary_bytes: int = 0
    magnitude_unary_bytes: int = 0
    magnitude_bytes: int = 0


class Exponents(NamedTuple):
    """Where the exponent is in a bit pattern, and from where down it makes classes.

    A value's class is `top` less its exponent, at least 0 and at most N_CLASSES - 1.
    """

    shift: int
    mask: int
    """After the shift."""
    top: int


class Ranked(NamedTuple):
    """Changes by the classes of what they change, class after class."""

    counts: NDArray[np.uint32]
    """Changes of each class."""
    ranks: Positions
    """Of each change among its class's values; within a class as `Positions` are."""
    steps: Steps


def padded(n_bits: int) -> int:
    """Return the bytes of a section of so many bits."""
    return (n_bits + 63) // 64 * 8
