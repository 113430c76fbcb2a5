"""Lossless deltas between two versions of a chunk of weights: encode, apply, compose, invert.

Pure: bytes in, bytes out, the same on every machine. The format is in `docs/weights-format.md`.
"""

from shared.weights.codec.blob import BaseNeeded, CorruptDelta, Info, Kind, inspect
from shared.weights.codec.delta import apply, apply_into, compose, encode, invert

__all__ = [
    "BaseNeeded",
    "CorruptDelta",
    "Info",
    "Kind",
    "apply",
    "apply_into",
    "compose",
    "encode",
    "inspect",
    "invert",
]
