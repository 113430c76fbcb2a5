"""Columns of numbers as little-endian bytes, as messages contain them.

Encoding and decoding 16 x 8,192 tokens takes 20 ms as msgpack lists and 0.1 ms as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = np.dtype("<u8")
U32 = np.dtype("<u4")
U8 = np.dtype("u1")
I32 = np.dtype("<i4")
F32 = np.dtype("<f4")

Array = npt.NDArray[np.generic]


def pack(values: Sequence[int] | Sequence[float] | Array, dtype: np.dtype[np.generic]) -> bytes:
    """Return `values` as a column of `dtype`."""
    return np.asarray(values, dtype=dtype).tobytes()


def unpack(column: bytes, dtype: np.dtype[np.generic]) -> Array:
    """Return a read-only view of a column."""
    return np.frombuffer(column, dtype=dtype)


def ints(column: bytes, dtype: np.dtype[np.generic] = I32) -> list[int]:
    """Return an integer column as a list."""
    out: list[int] = np.frombuffer(column, dtype=dtype).tolist()
    return out


def floats(column: bytes) -> list[float]:
    """Return a float32 column as a list."""
    out: list[float] = np.frombuffer(column, dtype=F32).tolist()
    return out


def length(column: bytes, dtype: np.dtype[np.generic] = I32) -> int:
    """Return the number of entries in a column."""
    return len(column) // dtype.itemsize
