"""Deltas of weights in tests: applied to a copy, taken apart, and sealed again after a change."""

from __future__ import annotations

import struct

from blake3 import blake3

from rlboost.shared.weights.delta import CHECKED_HEADER, HEADER, apply_delta


def applied(base: bytes, delta: bytes) -> bytes:
    """Return what the delta makes of the base."""
    target = bytearray(base)
    apply_delta(target, delta)
    return bytes(target)


def sealed(checked: bytes, payload: bytes) -> bytes:
    """Return a delta of this header and payload, with the checksum that they should have."""
    return checked + blake3(checked + payload).digest(length=8) + payload


def resealed(delta: bytes) -> bytes:
    """Return the delta with the checksum that its bytes should have."""
    return sealed(delta[: CHECKED_HEADER.size], delta[HEADER.size :])


def blobs_of(delta: bytes) -> list[bytes]:
    """Return the metadata and pages in the payload."""
    blobs, at = list[bytes](), HEADER.size
    while at < len(delta):
        (n,) = struct.unpack_from("<I", delta, at)
        blobs.append(delta[at + 4 : at + 4 + n])
        at += 4 + n
    return blobs


def with_blobs(delta: bytes, blobs: list[bytes]) -> bytes:
    """Return the delta with another payload."""
    return sealed(delta[: CHECKED_HEADER.size], b"".join(struct.pack("<I", len(blob)) + blob for blob in blobs))
