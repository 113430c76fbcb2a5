"""The inner loops of the codec: one interface, an implementation in numpy and one in C, the same bytes from both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.weights.codec.arrays import Bits, Exponents, Magnitudes, Params, Positions, Ranked, Steps, Values
from shared.weights.codec.numpy_kernels import NumpyKernels


class Kernels(Protocol):
    """What has to be fast. Decoders raise `CorruptDelta` for bits that no encoder writes."""

    @property
    def name(self) -> str:
        """Of the implementation."""

    def diff(self, base: Values, new: Values) -> tuple[Positions, Steps]:
        """Return where two arrays of one length differ, and the steps from one to the other."""

    def add(self, target: Values, positions: Positions, steps: Steps) -> None:
        """Take the steps at the positions, in place."""

    def add_payload(self, target: Values, payload: memoryview, count: int, params: Params) -> bool:
        """Decode a rice delta's payload, checked by `Sections`, and take its steps, in place, at once.

        False where this implementation has nothing better than to decode and add.
        """

    def add_rice(self, target: Values, low: Bits, unary: Bits, k: int, steps: Steps) -> None:
        """Take the steps at the positions of this Rice code, in place."""

    def add_bitmap(self, target: Values, bitmap: Bits, steps: Steps) -> None:
        """Take the steps where the bitmap has ones, in place."""

    def rice_pack(self, positions: Positions, k: int) -> tuple[Bits, Bits]:
        """Return the low k bits of the gaps, packed, and what is above them, unary."""

    def rice_unpack(self, low: Bits, unary: Bits, count: int, k: int, n: int) -> Positions:
        """Invert `rice_pack`; positions are below n. 8 bytes can be read from each byte of `low`'s fields on."""

    def bitmap_pack(self, positions: Positions, n: int) -> Bits:
        """Return n bits with ones at the positions."""

    def bitmap_unpack(self, bitmap: Bits, count: int, n: int) -> Positions:
        """Invert `bitmap_pack`."""

    def split(self, steps: Steps) -> tuple[Bits, Positions, Magnitudes]:
        """Return the signs, and the indices and magnitudes of steps beyond 1."""

    def join(self, signs: Bits, escapes: Positions, magnitudes: Magnitudes, count: int, width: int) -> Steps:
        """Invert `split`."""

    def golomb_pack(self, magnitudes: Magnitudes, k: int) -> tuple[Bits, Bits]:
        """Return an exponential Golomb code of the numbers: their lengths, unary, and their bits."""

    def golomb_unpack(self, unary: Bits, fields: Bits, fields_bytes: int, count: int, k: int, width: int) -> Magnitudes:
        """Invert `golomb_pack`; the fields have `fields_bytes` bytes and 8 more can be read."""

    def merge(
        self, first: Positions, first_steps: Steps, second: Positions, second_steps: Steps
    ) -> tuple[Positions, Steps]:
        """Return the sum of two sets of steps, without those that cancel."""

    def rank(
        self, base: Values, exponents: Exponents, positions: Positions, steps: Steps
    ) -> tuple[Ranked, NDArray[np.uint32]]:
        """Return the changes by classes of the base, and how many values each class has."""

    def unrank(self, base: Values, exponents: Exponents, ranked: Ranked) -> tuple[Positions, Steps]:
        """Invert `rank`; ranks are below their class's values."""


def available() -> dict[str, Kernels]:
    """Return the implementations that run here, slowest first."""
    return dict(_AVAILABLE)


def active() -> Kernels:
    """Return the implementation in use: the fastest, unless `using` says otherwise."""
    return _active


@contextmanager
def using(name: str) -> Iterator[Kernels]:
    """Let one implementation do all work of the process within the block; for tests and benchmarks."""
    global _active  # noqa: PLW0603 - one switch for the process, restored at the end of the block
    before, _active = _active, _AVAILABLE[name]
    try:
        yield _active
    finally:
        _active = before


def _native_kernels() -> Mapping[str, Kernels]:
    try:
        from shared.weights.codec.native_kernels import native_kernels  # noqa: PLC0415 - the extension is optional
    except ImportError:
        return {}
    return native_kernels()


_AVAILABLE: dict[str, Kernels] = {"numpy": NumpyKernels(), **_native_kernels()}
_active = next(reversed(_AVAILABLE.values()))
