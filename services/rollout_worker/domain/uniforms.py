"""One uniform random number per (seed, offset), so that the randomness of a sample needs no state.

A worker that resumes a sample at offset o needs only the seed. The generator is SplitMix64 (Steele, Lea, Flood: "Fast
splittable pseudorandom number generators", OOPSLA 2014), evaluated directly at any offset and started from a hash of
the seed, so that neighboring seeds are independent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def as_u64(seed: int) -> int:
    """Return any integer as an unsigned 64-bit seed."""
    return seed & _MASK


def uniforms(seeds: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, offset); both arrays have the shape [n].

    The numbers are multiples of 2^-52, so that `number * total` never rounds up to `total`.
    """
    state = _mix(seeds + _GAMMA) + (offsets.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def stream_seed(seed: int, offset: int) -> int:
    """Return the seed with which an engine's own random generator starts a sample at an offset, below 2^63."""
    uniform = uniforms(np.array([as_u64(seed)], np.uint64), np.array([offset], np.int64))
    return int(uniform[0] * 2.0**63)
