"""The codec's inner loops in C, at one SIMD level: allocates the arrays that the extension writes into."""
# ruff: noqa: D102 - `shared.weights.codec.kernels.Kernels` says what each method does.

from __future__ import annotations

import numpy as np

from rlboost.shared.weights.codec import _native
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

LEVELS = ("scalar", "avx2", "avx512")
_FUSED_LEVEL = 2
"""From this level on a payload is decoded and added block by block, and dense positions through a bitmap."""
_SLACK = 64
"""Extra elements of an output array: the extension stores whole vectors."""


class NativeKernels:
    """See `shared.weights.codec.kernels.Kernels`."""

    def __init__(self, level: int) -> None:
        self._level = level

    @property
    def name(self) -> str:
        """Name of the SIMD level."""
        return LEVELS[self._level]

    def diff(self, base: Values, new: Values) -> tuple[Positions, Steps]:
        _native.use_level(self._level)
        width = base.itemsize
        positions, steps = _numbers(len(base)), _steps(len(base), width)
        count = _native.diff(base, new, width, positions, steps)
        return positions[:count], steps[:count]

    def add(self, target: Values, positions: Positions, steps: Steps) -> None:
        _native.use_level(self._level)
        _native.add(target, positions, steps, target.itemsize)

    def add_payload(self, target: Values, payload: memoryview, count: int, params: Params) -> bool:
        if self._level < _FUSED_LEVEL or self._by_bitmap(target, params.k):
            return False
        _native.use_level(self._level)
        if _native.add_payload(target, payload, count, target.itemsize, *params) is None:
            raise CorruptDelta(f"the delta does not have {count} positions and steps among {len(target)}")
        return True

    def add_rice(self, target: Values, low: Bits, unary: Bits, k: int, steps: Steps) -> None:
        n, count = len(target), len(steps)
        if self._by_bitmap(target, k):
            bitmap = _bits(padded(n) + 32)
            if _native.rice1_bitmap(low, unary, count, n, bitmap) is None:
                raise CorruptDelta(f"the delta does not have {count} positions among {n}")
            self.add_bitmap(target, bitmap[: padded(n)], steps)
        else:
            self.add(target, self.rice_unpack(low, unary, count, k, n), steps)

    def _by_bitmap(self, target: Values, k: int) -> bool:
        return k == 1 and target.itemsize == 2 and self._level >= _FUSED_LEVEL

    def add_bitmap(self, target: Values, bitmap: Bits, steps: Steps) -> None:
        _native.use_level(self._level)
        if _native.add_bitmap(target, bitmap, _spacious(steps), len(steps), target.itemsize) is None:
            raise CorruptDelta(f"the delta's bitmap does not have {len(steps)} ones among {len(target)}")

    def rice_pack(self, positions: Positions, k: int) -> tuple[Bits, Bits]:
        count = len(positions)
        if not count:
            return _bits(0), _bits(0)
        low = _bits(padded(count * k) + 16)
        unary = _bits(padded(count + (int(positions[-1]) >> k)))
        length = _native.rice_pack(positions, k, low, unary)
        return low[: padded(count * k)], unary[:length]

    def rice_unpack(self, low: Bits, unary: Bits, count: int, k: int, n: int) -> Positions:
        _native.use_level(self._level)
        positions = _numbers(count)
        if _native.rice_unpack(low, unary, count, k, n, positions) is None:
            raise CorruptDelta(f"the delta does not have {count} positions among {n}")
        return positions[:count]

    def bitmap_pack(self, positions: Positions, n: int) -> Bits:
        bits = _bits(padded(n))
        _native.bitmap_pack(positions, bits)
        return bits

    def bitmap_unpack(self, bitmap: Bits, count: int, n: int) -> Positions:
        _native.use_level(self._level)
        positions = _numbers(count)
        if _native.bitmap_unpack(bitmap, count, n, positions) is None:
            raise CorruptDelta(f"the delta's bitmap does not have {count} ones among {n}")
        return positions[:count]

    def split(self, steps: Steps) -> tuple[Bits, Positions, Magnitudes]:
        _native.use_level(self._level)
        signs, escapes, magnitudes = _bits(padded(len(steps))), _numbers(len(steps)), _numbers(len(steps))
        count = _native.split(steps, steps.itemsize, signs, escapes, magnitudes)
        return signs, escapes[:count], magnitudes[:count]

    def join(self, signs: Bits, escapes: Positions, magnitudes: Magnitudes, count: int, width: int) -> Steps:
        _native.use_level(self._level)
        steps = _steps(count, width)
        _native.join(signs, escapes, magnitudes, width, steps)
        return steps[:count]

    def golomb_pack(self, magnitudes: Magnitudes, k: int) -> tuple[Bits, Bits]:
        if not len(magnitudes):
            return _bits(0), _bits(0)
        room = len(magnitudes) * 4 + 24
        unary, fields = _bits(room), _bits(room)
        unary_length, length = _native.golomb_pack(magnitudes, k, unary, fields)
        return unary[:unary_length], fields[:length]

    def golomb_unpack(self, unary: Bits, fields: Bits, fields_bytes: int, count: int, k: int, width: int) -> Magnitudes:
        _native.use_level(self._level)
        magnitudes = _numbers(count)
        if _native.golomb_unpack(unary, fields, fields_bytes, count, k, width, magnitudes) is None:
            raise CorruptDelta(f"the delta does not have {count} magnitudes in {fields_bytes} bytes")
        return magnitudes[:count]

    def merge(
        self, first: Positions, first_steps: Steps, second: Positions, second_steps: Steps
    ) -> tuple[Positions, Steps]:
        room, width = len(first) + len(second), first_steps.itemsize
        positions, steps = _numbers(room), _steps(room, width)
        count = _native.merge(first, first_steps, second, second_steps, width, positions, steps)
        return positions[:count], steps[:count]


def native_kernels() -> dict[str, NativeKernels]:
    """Return the levels that this processor supports, slowest first."""
    return {LEVELS[level]: NativeKernels(level) for level in range(_native.best_level() + 1)}


def _numbers(count: int) -> Positions:
    return np.empty(count + _SLACK, dtype=np.uint32)


def _steps(count: int, width: int) -> Steps:
    return np.empty(count + _SLACK, dtype=STEP_TYPES[width])


def _bits(n_bytes: int) -> Bits:
    return np.empty(n_bytes, dtype=np.uint8)


def _spacious(steps: Steps) -> Steps:
    """Return the whole array from `_steps`, of which `steps` is a prefix."""
    return steps.base if steps.base is not None else steps
