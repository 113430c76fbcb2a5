"""Lossless deltas between two versions of a chunk of weights: encode, apply, compose.

Pure functions on bytes; every machine produces the same bytes. The format is in `docs/weights-format.md`.
"""

from rlboost.shared.weights.codec.blob import CorruptDelta, Info, Kind, inspect
from rlboost.shared.weights.codec.delta import apply, apply_into, compose, encode

__all__ = [
    "CorruptDelta",
    "Info",
    "Kind",
    "apply",
    "apply_into",
    "compose",
    "encode",
    "inspect",
]
