"""The experts that a model's routers selected for the tokens of a completion, as a column of bytes.

An entry per completion token: the experts of the pass that generated it, [layers, experts per token]. Layers without
experts have entries too, of any value below the number of experts. One byte per expert, two for models with more than
256 experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
