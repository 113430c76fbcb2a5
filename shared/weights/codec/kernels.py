"""The inner loops of the codec: one interface, implemented in numpy and in C, with identical output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rlboost.shared.weights.codec.arrays import Bits, Magnitudes, Params, Positions, Steps, Values
from rlboost.shared.weights.codec.numpy_kernels import NumpyKernels


class Kernels(Protocol):
    """The performance-critical operations. Decoders raise `CorruptDelta` for bits that no encoder writes."""

    @property
    def name(self) -> str:
        """Name of the implementation."""

    def diff(self, base: Values, new: Values) -> tuple[Positions, Steps]:
        """Return where two arrays of equal length differ, and the steps from the first to the second."""

    def add(self, target: Values, positions: Positions, steps: Steps) -> None:
        """Add the steps at the positions, in place."""

    def add_payload(self, target: Values, payload: memoryview, count: int, params: Params) -> bool:
        """Decode a rice payload that `Sections` has checked and add its steps, in place, in one pass.

        Returns False if this implementation has no fused version: decode and add instead.
        """

    def add_rice(self, target: Values, low: Bits, unary: Bits, k: int, steps: Steps) -> None:
        """Add the steps at the positions of this Rice code, in place."""

    def add_bitmap(self, target: Values, bitmap: Bits, steps: Steps) -> None:
        """Add the steps where the bitmap has ones, in place."""

    def rice_pack(self, positions: Positions, k: int) -> tuple[Bits, Bits]:
        """Return the low k bits of the gaps, packed, and their high bits in unary."""

    def rice_unpack(self, low: Bits, unary: Bits, count: int, k: int, n: int) -> Positions:
        """Invert `rice_pack`; positions are below n. `low` has 8 readable bytes from every byte of its fields."""

    def bitmap_pack(self, positions: Positions, n: int) -> Bits:
        """Return n bits with ones at the positions."""

    def bitmap_unpack(self, bitmap: Bits, count: int, n: int) -> Positions:
        """Invert `bitmap_pack`."""

    def split(self, steps: Steps) -> tuple[Bits, Positions, Magnitudes]:
        """Return the signs, and the indices and magnitudes of steps beyond 1."""

    def join(self, signs: Bits, escapes: Positions, magnitudes: Magnitudes, count: int, width: int) -> Steps:
        """Invert `split`."""

    def golomb_pack(self, magnitudes: Magnitudes, k: int) -> tuple[Bits, Bits]:
        """Return an exponential Golomb code of the numbers: their lengths in unary, and their bits."""

    def golomb_unpack(self, unary: Bits, fields: Bits, fields_bytes: int, count: int, k: int, width: int) -> Magnitudes:
        """Invert `golomb_pack`; `fields` has `fields_bytes` bytes and 8 more that can be read."""

    def merge(
        self, first: Positions, first_steps: Steps, second: Positions, second_steps: Steps
    ) -> tuple[Positions, Steps]:
        """Return the sum of two sets of steps, without those that cancel."""


def available() -> dict[str, Kernels]:
    """Return the implementations that run here, slowest first."""
    return dict(_AVAILABLE)


def active() -> Kernels:
    """Return the implementation in use: the fastest, unless `using` selects another."""
    return _active


@contextmanager
def using(name: str) -> Iterator[Kernels]:
    """Use one implementation in the whole process within the block; for tests and benchmarks."""
    global _active  # noqa: PLW0603 - one switch for the process, restored at the end of the block
    before, _active = _active, _AVAILABLE[name]
    try:
        yield _active
    finally:
        _active = before


def _native_kernels() -> Mapping[str, Kernels]:
    try:
        from rlboost.shared.weights.codec.native_kernels import native_kernels  # noqa: PLC0415 - the extension is optional
    except ImportError:
        return {}
    return native_kernels()


_AVAILABLE: dict[str, Kernels] = {"numpy": NumpyKernels(), **_native_kernels()}
_active = next(reversed(_AVAILABLE.values()))
