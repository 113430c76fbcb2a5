"""A peer's holdings, encoded in one bit per blob.

A blob index is an ordered list of digests that every machine derives from the same document: the chunks of a manifest
or the deltas of one hop. Its id is the digest of the list, so a bitmap describes which of its blobs a peer holds.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from blake3 import blake3

ALL = "*"
"""Stands for a bitmap of ones."""


class BlobIndex:
    """An ordered list of blobs."""

    def __init__(self, digests: Sequence[str]) -> None:
        """Index the digests in this order."""
        self.digests = tuple(digests)
        self.id = blake3("".join(self.digests).encode()).hexdigest()[:32]

    def encode_bitmap(self, held: AbstractSet[str]) -> str:
        """Return the held ones as text: a base64 bitmap, `ALL`, or an empty string for none."""
        bits = np.fromiter((digest in held for digest in self.digests), dtype=bool, count=len(self.digests))
        if not bits.any():
            return ""
        return ALL if bits.all() else base64.b64encode(np.packbits(bits).tobytes()).decode()

    def decode_bitmap(self, bitmap: str) -> Iterable[str]:
        """Invert `encode_bitmap`; an invalid bitmap counts as none."""
        if bitmap == ALL:
            return self.digests
        try:
            packed = np.frombuffer(base64.b64decode(bitmap, validate=True), dtype=np.uint8)
        except (binascii.Error, ValueError):
            return ()
        if len(packed) != -(-len(self.digests) // 8):
            return ()
        return (self.digests[index] for index in np.flatnonzero(np.unpackbits(packed, count=len(self.digests))))


def bitmaps_of(indexes: Iterable[BlobIndex], held: AbstractSet[str]) -> dict[str, str]:
    """Return index id -> bitmap. An index without held blobs is included: this peer pulls its blobs."""
    return {index.id: index.encode_bitmap(held) for index in indexes if index.digests}


def blobs_in(indexes: Iterable[BlobIndex], holds: Mapping[str, str]) -> set[str]:
    """Invert `bitmaps_of`, for the given indexes."""
    return {digest for index in indexes if index.id in holds for digest in index.decode_bitmap(holds[index.id])}
