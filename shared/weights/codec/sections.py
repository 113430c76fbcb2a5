"""The payload of a rice or bitmap delta: parameters, sections padded to words of 8 bytes, and a guard.

The layout is in `docs/weights-format.md`. Every length is checked against the payload before memory is allocated
for it.
"""

from __future__ import annotations

import math
import struct
from itertools import accumulate

import numpy as np

from rlboost.shared.weights.codec.arrays import Bits, Magnitudes, Params, Positions, Steps, padded
from rlboost.shared.weights.codec.blob import Buffer, CorruptDelta, Info, Kind
from rlboost.shared.weights.codec.kernels import Kernels

MAX_K = 24
"""Largest parameter of a Rice code."""
MAX_MAGNITUDE_K = 30
"""Largest parameter of the Golomb code of magnitudes: less than the bits of a step."""
GUARD = bytes(8)
"""Ends the payload, so that a decoder may read 8 bytes from any bit of a section."""
PARAMS = struct.Struct("<BBBxIIIII")
LOW, HIGH, SIGNS, ESCAPES_LOW, ESCAPES_HIGH, LENGTHS, MAGNITUDES = range(7)
"""The sections, in their order. The bitmap of a bitmap delta is `HIGH`."""
_SAMPLE = 512
"""Magnitudes sampled to choose their parameter."""


class Sections:
    """The sections of a rice or bitmap delta, located in its payload but not decoded."""

    def __init__(self, info: Info, payload: memoryview) -> None:
        """Check the parameters and lengths.

        Raises:
            CorruptDelta: they contradict the header or do not add up to the payload.

        """
        if len(payload) < PARAMS.size + len(GUARD):
            raise CorruptDelta(f"the delta's payload has only {len(payload)} bytes")
        self.params = params = Params(*PARAMS.unpack_from(payload))
        if params.k > MAX_K or params.escape_k > MAX_K or params.magnitude_k > MAX_MAGNITUDE_K:
            raise CorruptDelta(f"the delta's codes have parameters above {MAX_K} or {MAX_MAGNITUDE_K}")
        if params.n_escapes > info.n_changed:
            raise CorruptDelta(f"the delta escapes {params.n_escapes} of {info.n_changed} changes")
        if info.kind == Kind.BITMAP and (params.k or params.unary_bytes != padded(info.n_values)):
            raise CorruptDelta("the delta's bitmap does not have one bit for every value")
        lengths = (
            padded(info.n_changed * params.k),
            params.unary_bytes,
            padded(info.n_changed),
            padded(params.n_escapes * params.escape_k),
            params.escape_unary_bytes,
            params.magnitude_unary_bytes,
            params.magnitude_bytes,
        )
        if any(length % 8 for length in lengths) or PARAMS.size + sum(lengths) + len(GUARD) != len(payload):
            raise CorruptDelta(f"the delta's sections do not add up to its payload of {len(payload)} bytes")
        self.info = info
        self._payload, self._ends = payload, tuple(accumulate(lengths, initial=PARAMS.size))

    def cut(self, number: int) -> Bits:
        """Return a section and everything after it: the last fields are read with the bytes that follow them."""
        return np.frombuffer(self._payload, dtype=np.uint8, offset=self._ends[number])

    def cut_off(self, number: int) -> Bits:
        """Return one section."""
        begin, end = self._ends[number : number + 2]
        return np.frombuffer(self._payload, dtype=np.uint8, offset=begin, count=end - begin)

    def positions(self, kernels: Kernels) -> Positions:
        """Decode the positions of the changed values."""
        info, params = self.info, self.params
        if info.kind == Kind.BITMAP:
            return kernels.bitmap_unpack(self.cut_off(HIGH), info.n_changed, info.n_values)
        return kernels.rice_unpack(self.cut(LOW), self.cut_off(HIGH), info.n_changed, params.k, info.n_values)

    def steps(self, kernels: Kernels) -> Steps:
        """Decode the steps, in order of position."""
        info, params = self.info, self.params
        escapes = kernels.rice_unpack(
            self.cut(ESCAPES_LOW), self.cut_off(ESCAPES_HIGH), params.n_escapes, params.escape_k, info.n_changed
        )
        magnitudes = kernels.golomb_unpack(
            self.cut_off(LENGTHS),
            self.cut(MAGNITUDES),
            params.magnitude_bytes,
            params.n_escapes,
            params.magnitude_k,
            info.width,
        )
        return kernels.join(self.cut_off(SIGNS), escapes, magnitudes, info.n_changed, info.width)


def pack_steps(kernels: Kernels, kind: Kind, positions: Positions, steps: Steps, n_values: int) -> list[Buffer]:
    """Return the payload of a rice or bitmap delta."""
    k = rice_k(n_values, len(positions)) if kind == Kind.RICE else 0
    if kind == Kind.RICE:
        low, unary = kernels.rice_pack(positions, k)
    else:
        low, unary = np.empty(0, dtype=np.uint8), kernels.bitmap_pack(positions, n_values)
    signs, escapes, magnitudes = kernels.split(steps)
    escape_k = rice_k(len(steps), len(escapes))
    escape_low, escape_unary = kernels.rice_pack(escapes, escape_k)
    magnitude_k = golomb_k(magnitudes)
    magnitude_unary, magnitude_bits = kernels.golomb_pack(magnitudes, magnitude_k)
    params = Params(
        k,
        escape_k,
        magnitude_k,
        len(unary),
        len(escapes),
        len(escape_unary),
        len(magnitude_unary),
        len(magnitude_bits),
    )
    sections = (low, unary, signs, escape_low, escape_unary, magnitude_unary, magnitude_bits)
    return [PARAMS.pack(*params), *map(_bytes, sections), GUARD]


def rice_bits(n: int, m: int, k: int) -> float:
    """Return the expected bits per position of a Rice code with parameter k, for m positions drawn uniformly of n."""
    unchanged = (1.0 - m / n) ** (1 << k)
    return k + 1 + unchanged / (1.0 - unchanged)


def rice_k(n: int, m: int) -> int:
    """Return the parameter of the shortest Rice code for m of n positions."""
    if m in (0, n):
        return 0
    # The best parameter is near log2(0.69 n / m).
    guess = max(0, math.floor(math.log2(0.69 * n / m)))
    candidates = range(max(0, guess - 1), min(MAX_K, guess + 2) + 1)
    return min(candidates, key=lambda k: rice_bits(n, m, k), default=MAX_K)


def golomb_k(magnitudes: Magnitudes) -> int:
    """Return the parameter of the shortest exponential Golomb code, estimated from a sample."""
    if not len(magnitudes):
        return 0
    sample = magnitudes[:: len(magnitudes) // _SAMPLE + 1].astype(np.float64)

    def bits(k: int) -> int:
        width = np.frexp(sample + (1 << k))[1] - 1
        return int((2 * width + 1 - k).sum())

    best, k = bits(0), 0
    while k < MAX_MAGNITUDE_K and (longer := bits(k + 1)) <= best:
        best, k = longer, k + 1
    return k


def _bytes(section: Bits) -> Buffer:
    return section.data
