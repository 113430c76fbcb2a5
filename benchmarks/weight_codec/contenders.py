"""The measured codecs: ours, and re-implementations of published formats.

Only the format is measured, without files, manifests, checksums and tensor names; ours includes its header and
checksum. The others are written in numpy, with libzstd where they use it; no code is copied.

- `u32 + value` (AstraFlow), `i32 + value` (verl): the flat index and the new value of each change.
- `xor + zstd` (slime, SkyRL): the bits that differ, of all values, under zstd. Level 1 is what a proposal to SkyRL
  names; slime's level was not found. slime has also proposed positions and values, which the first two rows are like.
- `gap + xor + zstd` (NeMo RL's design page for sparse-delta refit): flat positions as differences in the smallest of
  16, 32 and 64 bits, the changed values' bits that differ, all under zstd at level 1.
- `row, column + value + zstd` (PULSE's format 3.1, as the head of its source file tells it): rows and columns of
  changes as differences, columns anew in each row, in 8 and 16 bits where they fit and in 32 elsewhere, and the new
  values, all under zstd at level 1. A chunk is taken for a matrix of 2,048 columns, whatever tensors it is of.

AReaL, TRL, Fireworks and vLLM's sparse updates are left out: their formats were not looked into. PolyRL sends all
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from rlboost.shared.weights import codec
from rlboost.shared.weights.codec import Kind, kernels

Weights = NDArray[np.uint16]
COLUMNS = 2048


@dataclass
class Codec:
    """One codec for changes; `apply` works in place."""

    name: str
    encode: Callable[[Weights, Weights], Any]
    apply: Callable[[Weights, Any], None]
    size: Callable[[Any], int]
    kernels: str | None = None
    rounds: int | None = None
    """Rounds to run; fewer for slow codecs, None for all."""
    encode_s: dict[int, float] = field(default_factory=dict)
    """Best, by chunk."""
    apply_s: dict[int, float] = field(default_factory=dict)
    apply_again_s: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def using(self) -> AbstractContextManager[object]:
        return kernels.using(self.kernels or kernels.active().name)


def contenders() -> list[Codec]:
    best = kernels.active().name
    made = [_ours("ours", None, name) for name in reversed(kernels.available()) if name != "numpy"]
    made += [_ours("ours", None, "numpy", 2)]
    made += [_ours("ours, bitmap", Kind.BITMAP, best)]
    made += [_listed("u32 + value (AstraFlow)", np.uint32), _listed("i32 + value (verl)", np.int32)]
    return [*made, _xored(), _gaps(), _rows_and_columns()]


def _ours(name: str, kind: Kind | None, kernel: str, rounds: int | None = None) -> Codec:
    def encode(base: Weights, new: Weights) -> bytes:
        return codec.encode(base.data.cast("B"), new.data.cast("B"), "bfloat16", kind)

    def apply(target: Weights, delta: bytes) -> None:
        codec.apply_into(target.data.cast("B"), delta)

    return Codec(f"{name} ({kernel})", encode, apply, len, kernel, rounds)


def _listed(name: str, index: type[np.integer[Any]]) -> Codec:
    def encode(base: Weights, new: Weights) -> tuple[NDArray[Any], Weights]:
        places = np.flatnonzero(base != new)
        return places.astype(index), new[places]

    def apply(target: Weights, delta: tuple[NDArray[Any], Weights]) -> None:
        target[delta[0]] = delta[1]

    return Codec(name, encode, apply, lambda delta: delta[0].nbytes + delta[1].nbytes)


def _xored() -> Codec:
    def apply(target: Weights, delta: bytes) -> None:
        np.bitwise_xor(target, np.frombuffer(_unpacked(delta), dtype=np.uint16), out=target)

    return Codec("xor + zstd (slime, SkyRL)", lambda base, new: _packed((base ^ new).data), apply, len, None, 3)


def _gaps() -> Codec:
    def encode(base: Weights, new: Weights) -> tuple[type, int, bytes]:
        places = np.flatnonzero(base != new)
        gaps = np.diff(places, prepend=0)
        kind = _smallest(gaps, np.uint16, np.uint32)
        return kind, len(places), _packed(gaps.astype(kind).tobytes() + (base[places] ^ new[places]).tobytes())

    def apply(target: Weights, delta: tuple[type, int, bytes]) -> None:
        kind, count, packed = delta
        data = _unpacked(packed)
        gaps: NDArray[Any] = np.frombuffer(data, dtype=kind, count=count)
        target[np.cumsum(gaps, dtype=np.int64)] ^= np.frombuffer(data, dtype=np.uint16, offset=gaps.nbytes)

    return Codec("gap + xor + zstd (NeMo RL)", encode, apply, lambda delta: len(delta[2]), None, 3)


def _rows_and_columns() -> Codec:
    def encode(base: Weights, new: Weights) -> tuple[type, type, int, bytes]:
        places = np.flatnonzero(base != new)
        rows, columns = np.divmod(places, COLUMNS)
        rows_apart = np.diff(rows, prepend=0)
        begins = np.diff(rows, prepend=-1) > 0
        columns_apart = np.where(begins, columns, np.diff(columns, prepend=0))
        row_kind = _smallest(rows_apart, np.uint8, np.int32)
        column_kind = _smallest(columns_apart, np.uint16, np.int32)
        columns_of_delta: tuple[NDArray[Any], ...] = (
            rows_apart.astype(row_kind),
            columns_apart.astype(column_kind),
            new[places],
        )
        return row_kind, column_kind, len(places), _packed(b"".join(column.tobytes() for column in columns_of_delta))

    def apply(target: Weights, delta: tuple[type, type, int, bytes]) -> None:
        row_kind, column_kind, count, packed = delta
        data = _unpacked(packed)
        rows_apart: NDArray[Any] = np.frombuffer(data, dtype=row_kind, count=count)
        columns_apart: NDArray[Any] = np.frombuffer(data, dtype=column_kind, count=count, offset=rows_apart.nbytes)
        begins = rows_apart > 0
        begins[:1] = True
        summed = np.cumsum(columns_apart, dtype=np.int64)
        before = (summed - columns_apart)[begins]
        columns = summed - before[np.cumsum(begins) - 1]
        places = np.cumsum(rows_apart, dtype=np.int64) * COLUMNS + columns
        target[places] = np.frombuffer(data, dtype=np.uint16, offset=rows_apart.nbytes + columns_apart.nbytes)

    size = lambda delta: len(delta[3])  # noqa: E731 - as its neighbours have it
    return Codec("row, column + value + zstd (PULSE)", encode, apply, size, None, 3)


def _smallest(numbers: NDArray[Any], narrow: type, wide: type) -> type:
    return narrow if not len(numbers) or numbers.max() <= np.iinfo(narrow).max else wide


def _packed(data: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _unpacked(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
