"""The publisher's memory: one rank's chunks as last published, so that the next version can be told as deltas."""

from __future__ import annotations

from typing import NamedTuple

from shared.weights import codec
from shared.weights.edges import Edge
from shared.weights.manifest import ITEM_BYTES, ChunkRef, digest_of

DELTA_DTYPES = frozenset({"bfloat16", "float16", "float32"})
"""What the codec knows how to make small. It is exact for any bytes whatever they are taken for."""


class Cut(NamedTuple):
    """One chunk of a part's stream."""

    ref: ChunkRef
    data: memoryview
    dtype: str
    """That of most of its bytes."""


class Delta(NamedTuple):
    """An edge to a new chunk, and the delta's bytes."""

    edge: Edge
    data: bytes


class Memory:
    """The bytes that one rank published last, in host memory: never more than one copy of its part."""

    def __init__(self, *, small: bool = False) -> None:
        """Remember nothing; `small` makes the smallest deltas there are, which take longer on both sides."""
        self._small = small
        self._owner = ("", -1)
        self._version = -1
        self._digests: list[str] = []
        self._chunks: list[bytearray] = []

    def forget(self) -> None:
        """Drop everything: the next version is published without deltas."""
        self._owner, self._version = ("", -1), -1
        self._digests, self._chunks = [], []

    def begin(self, job_id: str, rank: int, version: int) -> int:
        """Prepare for this rank's part of a version; return the older one that is remembered of it, -1 for none."""
        if self._owner != (job_id, rank) or self._version >= version:
            self.forget()
            self._owner = job_id, rank
        return self._version

    def exchange(self, index: int, cut: Cut) -> Delta | None:
        """Remember the part's chunk `index`; return the delta to it, None where it would not pay. Slow: a thread's."""
        if index >= len(self._chunks):
            self._digests.append(cut.ref.digest)
            self._chunks.append(bytearray(cut.data))
            return None
        base, old = self._digests[index], self._chunks[index]
        if base == cut.ref.digest:
            return None
        delta = _delta(base, old, cut, small=self._small) if len(old) == cut.ref.n_bytes else None
        # In place, where it has the same size: new pages would cost more than the copy.
        old[:] = cut.data
        self._digests[index] = cut.ref.digest
        return delta

    def end(self, version: int, n_chunks: int) -> None:
        """Say that the part is whole, and which version it was."""
        del self._digests[n_chunks:], self._chunks[n_chunks:]
        self._version = version


def _delta(base: str, old: bytearray, cut: Cut, *, small: bool) -> Delta | None:
    if cut.dtype not in DELTA_DTYPES or cut.ref.n_bytes % ITEM_BYTES[cut.dtype]:
        return None
    data = codec.encode(old, cut.data, cut.dtype, small=small)
    if 2 * len(data) > cut.ref.n_bytes:
        return None
    return Delta(Edge(cut.ref.digest, base, digest_of(data), len(data)), data)
