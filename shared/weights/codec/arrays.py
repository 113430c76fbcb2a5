"""The arrays that the codec's kernels encode."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint8]
"""A bit stream: bit i is bit i % 8 of byte i // 8. Sections are zero-padded to words of 8 bytes."""
Positions = NDArray[np.uint32]
"""Ascending, without duplicates."""
Magnitudes = NDArray[np.uint32]
"""Absolute values of the steps beyond 1, minus 2."""
Values = NDArray[Any]
"""Bit patterns of weights: uint16 or uint32."""
Steps = NDArray[Any]
"""Differences of ordered integers, modulo their range: int16 or int32, never zero."""

VALUE_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
STEP_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<i2"), 4: np.dtype("<i4")}


class Params(NamedTuple):
    """The parameters before the sections; lengths are in bytes."""

    k: int = 0
    escape_k: int = 0
    magnitude_k: int = 0
    unary_bytes: int = 0
    """Unary code of the positions; the bitmap in a bitmap delta."""
    n_escapes: int = 0
    escape_unary_bytes: int = 0
    magnitude_unary_bytes: int = 0
    magnitude_bytes: int = 0


def padded(n_bits: int) -> int:
    """Return the bytes of a section of `n_bits`."""
    return (n_bits + 63) // 64 * 8
