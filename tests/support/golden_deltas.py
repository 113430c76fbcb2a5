"""What is in the golden files of weight deltas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlboost.shared.weights.codec import Kind
from rlboost.shared.weights.codec.blob import WIDTHS

GOLDEN = Path(__file__).parents[1] / "golden" / "codec"
_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def golden_case(name: str) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger], str, Kind]:
    """Return what is in a golden file, from arithmetic that any language has."""
    kind, dtype = name.split("-")
    index = np.arange(1000, dtype=np.uint64)
    top = 1 << (8 * WIDTHS.get(dtype, 1))
    before = (index * 40503 + 12345) % top
    moved = (index * 7919) % 100 < (60 if kind == "bitmap" else 12)
    step = np.where(index % 9 == 0, index % 37 + 2, 1)
    after = np.where(moved, (before + step) % top, before)
    return (
        before.astype(_TYPES[WIDTHS.get(dtype, 1)]),
        after.astype(_TYPES[WIDTHS.get(dtype, 1)]),
        dtype,
        Kind[kind.upper()],
    )
