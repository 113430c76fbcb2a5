"""What a peer holds, in one bit a blob.

A catalogue is a list of digests that two machines have without telling each other: the chunks of a manifest, or the
deltas of one hop. Its id is the digest of the list. So what a peer has of it fits into a bitmap.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from blake3 import blake3

ALL = "*"
"""A bitmap of ones."""


class Catalogue:
    """An ordered list of blobs."""

    def __init__(self, digests: Sequence[str]) -> None:
        """Keep the digests, in this order."""
        self.digests = tuple(digests)
        self.id = blake3("".join(self.digests).encode()).hexdigest()[:32]

    def marked(self, held: AbstractSet[str]) -> str:
        """Return which of them are held, as text: a bitmap in base 64, `ALL`, or nothing for none."""
        bits = np.fromiter((digest in held for digest in self.digests), dtype=bool, count=len(self.digests))
        if not bits.any():
            return ""
        return ALL if bits.all() else base64.b64encode(np.packbits(bits).tobytes()).decode()

    def held(self, marks: str) -> Iterable[str]:
        """Invert `marked`; marks that cannot be this catalogue's stand for nothing."""
        if marks == ALL:
            return self.digests
        try:
            packed = np.frombuffer(base64.b64decode(marks, validate=True), dtype=np.uint8)
        except (binascii.Error, ValueError):
            return ()
        if len(packed) != -(-len(self.digests) // 8):
            return ()
        return (self.digests[index] for index in np.flatnonzero(np.unpackbits(packed, count=len(self.digests))))


def holdings(catalogues: Iterable[Catalogue], held: AbstractSet[str]) -> dict[str, str]:
    """Return catalogue id -> marks. One of which nothing is held is told too: its blobs are wanted."""
    return {catalogue.id: catalogue.marked(held) for catalogue in catalogues if catalogue.digests}


def blobs(catalogues: Iterable[Catalogue], holds: Mapping[str, str]) -> set[str]:
    """Invert `holdings`, for the catalogues that are known here."""
    return {
        digest for catalogue in catalogues if catalogue.id in holds for digest in catalogue.held(holds[catalogue.id])
    }
