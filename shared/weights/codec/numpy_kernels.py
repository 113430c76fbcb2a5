"""The codec's inner loops in numpy: the fallback for the C extension, and the reference in its tests."""
# ruff: noqa: D102 - `shared.weights.codec.kernels.Kernels` says what each method does.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlboost.shared.weights.codec.arrays import (
    STEP_TYPES,
    Bits,
    Magnitudes,
    Params,
    Positions,
    Steps,
    Values,
    padded,
)
from rlboost.shared.weights.codec.blob import CorruptDelta

_U64 = NDArray[np.uint64]


class NumpyKernels:
    """See `shared.weights.codec.kernels.Kernels`."""

    name = "numpy"

    def diff(self, base: Values, new: Values) -> tuple[Positions, Steps]:
        positions = np.flatnonzero(base != new).astype(np.uint32)
        steps = _ordered(new[positions]) - _ordered(base[positions])
        return positions, steps.view(STEP_TYPES[base.itemsize])

    def add(self, target: Values, positions: Positions, steps: Steps) -> None:
        _add(target, positions, steps)

    def add_payload(self, target: Values, payload: memoryview, count: int, params: Params) -> bool:  # noqa: ARG002 - one signature
        return False

    def add_rice(self, target: Values, low: Bits, unary: Bits, k: int, steps: Steps) -> None:
        _add(target, self.rice_unpack(low, unary, len(steps), k, len(target)), steps)

    def add_bitmap(self, target: Values, bitmap: Bits, steps: Steps) -> None:
        _add(target, self.bitmap_unpack(bitmap, len(steps), len(target)), steps)

    def rice_pack(self, positions: Positions, k: int) -> tuple[Bits, Bits]:
        count = len(positions)
        gaps = _gaps(positions.astype(np.int64))
        starts = np.arange(count, dtype=np.int64) * k
        low = _write_fields((gaps & ((1 << k) - 1)).astype(np.uint64), starts, count * k)
        return low, _unary(gaps >> k)

    def rice_unpack(self, low: Bits, unary: Bits, count: int, k: int, n: int) -> Positions:
        index = np.arange(count, dtype=np.int64)
        high = _ones(unary, count) - index
        gaps_low = _read_fields(low, index * k, np.full(count, k, dtype=np.int64)).astype(np.int64)
        positions = (high << k) + np.cumsum(gaps_low) + index
        if count and positions[-1] >= n:
            raise CorruptDelta(f"the delta has a position of {positions[-1]} among {n}")
        return positions.astype(np.uint32)

    def bitmap_pack(self, positions: Positions, n: int) -> Bits:
        return _bits_at(positions, padded(n))

    def bitmap_unpack(self, bitmap: Bits, count: int, n: int) -> Positions:
        positions = _set_bits(bitmap, count)
        if count and positions[-1] >= n:
            raise CorruptDelta(f"the delta has a position of {positions[-1]} among {n}")
        return positions.astype(np.uint32)

    def split(self, steps: Steps) -> tuple[Bits, Positions, Magnitudes]:
        signs = _bits_at(np.flatnonzero(steps < 0), padded(len(steps)))
        magnitudes = np.abs(steps.astype(np.int64))
        escapes = np.flatnonzero(magnitudes > 1).astype(np.uint32)
        return signs, escapes, (magnitudes[escapes] - 2).astype(np.uint32)

    def join(self, signs: Bits, escapes: Positions, magnitudes: Magnitudes, count: int, width: int) -> Steps:
        steps = np.ones(count, dtype=np.int64)
        steps[escapes] = magnitudes.astype(np.int64) + 2
        negative = np.unpackbits(signs, count=count, bitorder="little").astype(bool)
        steps[negative] *= -1
        return steps.astype(STEP_TYPES[width])

    def golomb_pack(self, magnitudes: Magnitudes, k: int) -> tuple[Bits, Bits]:
        shifted = magnitudes.astype(np.int64) + (1 << k)
        widths = np.frexp(shifted.astype(np.float64))[1].astype(np.int64) - 1
        starts = np.cumsum(widths) - widths
        fields = (shifted - (np.int64(1) << widths)).astype(np.uint64)
        return _unary(widths - k), _write_fields(fields, starts, int(widths.sum()))

    def golomb_unpack(self, unary: Bits, fields: Bits, fields_bytes: int, count: int, k: int, width: int) -> Magnitudes:
        widths = _gaps(_ones(unary, count)) + k
        total = int(widths.sum())
        if padded(total) != fields_bytes or (count and widths.max() > 31):
            raise CorruptDelta(f"the delta's magnitudes are of {total} bits in {fields_bytes} bytes")
        shifted = _read_fields(fields, np.cumsum(widths) - widths, widths).astype(np.int64) + (np.int64(1) << widths)
        magnitudes = shifted - (1 << k)
        if count and magnitudes.max() + 2 > 1 << (8 * width - 1):
            raise CorruptDelta("the delta has a step beyond the range of its dtype")
        return magnitudes.astype(np.uint32)

    def merge(
        self, first: Positions, first_steps: Steps, second: Positions, second_steps: Steps
    ) -> tuple[Positions, Steps]:
        positions, places = np.unique(np.concatenate([first, second]), return_inverse=True)
        steps = np.zeros(len(positions), dtype=first_steps.dtype)
        steps[places[: len(first)]] = first_steps
        steps[places[len(first) :]] += second_steps
        kept = steps != 0
        return positions[kept], steps[kept]


def _add(target: Values, positions: Positions, steps: Steps) -> None:
    target[positions] = _pattern(_ordered(target[positions]) + steps.view(target.dtype))


def _ordered(patterns: Values) -> Values:
    """Map bit patterns to integers that are ordered as the numbers are."""
    top = patterns.dtype.type(1 << (8 * patterns.itemsize - 1))
    return np.where(patterns & top, ~patterns, patterns | top)


def _pattern(ordered: Values) -> Values:
    """Invert `_ordered`."""
    top = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    return np.where(ordered & top, ordered & ~top, ~ordered)


def _gaps(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many numbers are skipped before each of these, which ascend from 0."""
    before = np.empty_like(numbers)
    before[:1] = -1
    before[1:] = numbers[:-1]
    return numbers - before - 1


def _bits_at(indices: NDArray[np.integer], n_bytes: int) -> Bits:
    bits = np.zeros(n_bytes * 8, dtype=np.uint8)
    bits[indices] = 1
    return np.packbits(bits, bitorder="little")


def _unary(numbers: NDArray[np.int64]) -> Bits:
    """Encode each number n as n zeros and a one."""
    ends = np.cumsum(numbers) + np.arange(len(numbers), dtype=np.int64)
    return _bits_at(ends, padded(int(ends[-1]) + 1 if len(ends) else 0))


def _set_bits(bits: Bits, count: int) -> NDArray[np.int64]:
    """Return the indices of the ones."""
    found = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    if len(found) != count:
        raise CorruptDelta(f"the delta has {len(found)} codes instead of {count}")
    return found


def _ones(unary: Bits, count: int) -> NDArray[np.int64]:
    """Return the indices of the ones of a unary code, which ends with the word of the last one."""
    ones = _set_bits(unary, count)
    if len(unary) != (padded(int(ones[-1]) + 1) if count else 0):
        raise CorruptDelta("the delta has a unary code with trailing words")
    return ones


def _write_fields(fields: _U64, starts: NDArray[np.int64], total: int) -> Bits:
    """Write numbers of at most 31 bits, each at its bit offset, into a section of `total` bits."""
    n_words = padded(total) // 4
    if not n_words:
        return np.empty(0, dtype=np.uint8)
    shifted = fields << (starts & 31).astype(np.uint64)
    words = starts >> 5
    # Fields do not overlap, so sums are unions; they stay below 2^32, which a float64 represents exactly. The last
    # field may be empty and start at the end of the section.
    low = np.bincount(words, weights=(shifted & np.uint64(0xFFFFFFFF)).astype(np.float64), minlength=n_words + 2)
    high = np.bincount(words + 1, weights=(shifted >> np.uint64(32)).astype(np.float64), minlength=n_words + 2)
    return (low + high)[:n_words].astype("<u4").view(np.uint8)


def _read_fields(bits: Bits, starts: NDArray[np.int64], widths: NDArray[np.int64]) -> _U64:
    """Invert `_write_fields`; 8 bytes are readable from each field's first byte."""
    window = np.zeros(len(starts), dtype=np.uint64)
    if len(starts):
        places = starts >> 3
        for number in range(5):
            window |= bits[places + number].astype(np.uint64) << np.uint64(8 * number)
    window >>= (starts & 7).astype(np.uint64)
    return window & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))
