"""Columns of numbers in messages as little-endian bytes, and of the experts that a model's routers selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# --- Columns of numbers as little-endian bytes, as messages contain them ----------------------------------------------
# Encoding and decoding 16 x 8,192 tokens takes 20 ms as msgpack lists and 0.1 ms as bytes.


U64 = np.dtype("<u8")
U32 = np.dtype("<u4")
U8 = np.dtype("u1")
I32 = np.dtype("<i4")
F32 = np.dtype("<f4")
TOP = np.dtype([("token", "<i4"), ("logprob", "<f4")])
"""One of the most likely tokens at a position."""

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


# --- The experts that a model's routers selected for the tokens of a completion, as a column of bytes -----------------
# An entry per completion token: the experts of the pass that generated it, [layers, experts per token]. Layers without
# experts have entries too, of any value below the number of experts. One byte per expert, two for models with more than
# 256 experts.


MAX_SAMPLE_BYTES = 64 << 20
"""The largest column of one sample: it is part of one message."""


class RoutedShape(NamedTuple):
    """What determines the size of a column."""

    layers: int
    experts_per_token: int
    experts: int

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of an expert's index."""
        return np.dtype("u1" if self.experts <= 256 else "<u2")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.experts_per_token * self.dtype.itemsize

    def unpack(self, column: bytes | bytearray | memoryview) -> npt.NDArray[Any]:
        """Return a column as a view of it, [tokens, layers, experts per token] of `dtype`.

        Raises:
            ValueError: its length is not a multiple of `token_bytes`.

        """
        return np.frombuffer(column, self.dtype).reshape(-1, self.layers, self.experts_per_token)

    def is_valid(self, column: bytes | memoryview, n_tokens: int) -> bool:
        """Return True if a column has `n_tokens` entries with experts of the model only."""
        return len(column) == n_tokens * self.token_bytes and bool((self.unpack(column) < self.experts).all())
