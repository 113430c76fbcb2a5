"""A digest of what a worker's commands have assigned to it: samples in their attempts, weights, suspension.

Worker and manager compute it independently and compare. It is a sum of hashes modulo 2^64: it does not depend on the
order, and the difference of two digests depends only on what exactly one of them contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2s
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

MODULUS = 1 << 64
_Hashes = npt.NDArray[np.uint64]
_SUSPENDED = 0x9E3779B97F4A7C15
_NOTHING: Mapping[str, int] = MappingProxyType({})


def command_digest(
    samples: Sequence[int],
    attempts: Sequence[int],
    weights: tuple[str, int] | None,
    *,
    suspended: bool,
    alongside: Mapping[str, int] = _NOTHING,
) -> int:
    """Return the digest.

    Args:
        samples: ids of the assigned samples.
        attempts: the attempt of each.
        weights: the assigned (job id, version), None before the first.
        suspended: True after `Suspend`, until `Resume`.
        alongside: what is assigned in addition to `weights`: job id -> version.

    """
    mixed = _mix(np.asarray(samples, np.uint64) + _mix(np.asarray(attempts, np.uint64)))
    total = int(mixed.sum(dtype=np.uint64))
    if suspended:
        total += _SUSPENDED
    if weights:
        total += _hash(*weights)
    total += sum(_hash(f"alongside/{job_id}", version) for job_id, version in alongside.items())
    return total % MODULUS


def _mix(values: _Hashes) -> _Hashes:
    """Return a hash of each value: the finalizer of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=256)
def _hash(job_id: str, version: int) -> int:
    return int.from_bytes(blake2s(f"{job_id}/{version}".encode(), digest_size=8).digest(), "little")
