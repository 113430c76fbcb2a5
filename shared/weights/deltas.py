"""Encodes a rank's chunks as deltas to those that it published last, which are retained in host memory."""

from __future__ import annotations

from typing import NamedTuple

from rlboost.shared.weights import codec
from rlboost.shared.weights.delta_graph import Edge
from rlboost.shared.weights.manifest import ITEM_BYTES, digest_of
from rlboost.shared.weights.shards import Chunk

DELTA_DTYPES = frozenset({"bfloat16", "float16", "float32"})
"""Dtypes for which the codec produces small deltas. It is exact for any bytes."""


class Delta(NamedTuple):
    """An edge to a new chunk, and the encoded delta."""

    edge: Edge
    data: bytes


class DeltaEncoder:
    """Holds the bytes that one rank published last in host memory: at most one copy of its part."""

    def __init__(self) -> None:
        """Start empty."""
        self._owner = ("", -1)
        self._version = -1
        self._digests: list[str] = []
        self._chunks: list[bytearray] = []

    def reset(self) -> None:
        """Drop the retained version: the next one is published without deltas."""
        self._owner, self._version = ("", -1), -1
        self._digests, self._chunks = [], []

    def begin(self, job_id: str, rank: int, version: int) -> int:
        """Start a version of this rank's part; return the older version that is retained, -1 for none."""
        if self._owner != (job_id, rank) or self._version >= version:
            self.reset()
            self._owner = job_id, rank
        return self._version

    def encode(self, index: int, chunk: Chunk) -> Delta | None:
        """Retain chunk `index` of the part; return the delta to it, None if it is too large. Call it in a thread."""
        if index >= len(self._chunks):
            self._digests.append(chunk.ref.digest)
            self._chunks.append(bytearray(chunk.data))
            return None
        base, old = self._digests[index], self._chunks[index]
        if base == chunk.ref.digest:
            return None
        delta = _delta(base, old, chunk) if len(old) == chunk.ref.n_bytes else None
        # In place if the size is equal: new pages would cost more than the copy.
        old[:] = chunk.data
        self._digests[index] = chunk.ref.digest
        return delta

    def end(self, version: int, n_chunks: int) -> None:
        """Finish the part: it is version `version` and has `n_chunks` chunks."""
        del self._digests[n_chunks:], self._chunks[n_chunks:]
        self._version = version


def _delta(base: str, old: bytearray, chunk: Chunk) -> Delta | None:
    if chunk.dtype not in DELTA_DTYPES or chunk.ref.n_bytes % ITEM_BYTES[chunk.dtype]:
        return None
    data = codec.encode(old, chunk.data, chunk.dtype)
    if 2 * len(data) > chunk.ref.n_bytes:
        return None
    return Delta(Edge(chunk.ref.digest, base, digest_of(data), len(data)), data)
