"""Limits the total size of the chunks: a write that would exceed it is rejected before the disk is full."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from rlboost.services.weight_store.ports import ChunkLocation, Chunks, StoreFull
from rlboost.shared.weights.manifest import ChunkRef

_RECLAIM_INTERVAL_S = 5.0
"""Minimum time between two garbage collections that a full store causes."""


class LimitedChunks:
    """`ports.Chunks` that hold about `max_bytes` at most.

    The total is measured by `measure` and counts every write since, so a chunk that replaces itself counts twice until
    the next measurement.
    """

    def __init__(self, chunks: Chunks, max_bytes: int, clock: Callable[[], float]) -> None:
        """Limit `chunks`; call `measure` before the first write."""
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._clock = clock
        self._used_bytes = 0
        self._reclaimed_at = float("-inf")
        self.reclaim: Callable[[], Awaitable[None]] = self.measure
        """Removes what is not needed, before a write is rejected: the store's collection, once it is loaded.

        The collection acquires the locks of jobs, so nothing may call `put` under one.
        """

    async def measure(self) -> None:
        """Measure the total size."""
        self._used_bytes = await self._chunks.n_bytes()

    async def n_bytes(self) -> int:
        """See `Chunks.n_bytes`."""
        return await self._chunks.n_bytes()

    async def put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
        """See `Chunks.put`."""
        n_bytes = sum(map(len, blocks))
        if self._used_bytes + n_bytes > self._max_bytes and self._clock() - self._reclaimed_at > _RECLAIM_INTERVAL_S:
            self._reclaimed_at = self._clock()
            await self.reclaim()
        if self._used_bytes + n_bytes > self._max_bytes:
            raise StoreFull(
                f"the weight store holds {self._used_bytes} of at most {self._max_bytes} bytes: delete the weights of "
                "ended jobs (DELETE /v1/models/JOB), retain fewer versions (RLBOOST_WEIGHT_STORE_KEEP_VERSIONS), or "
                "raise RLBOOST_WEIGHT_STORE_MAX_BYTES"
            )
        self._used_bytes += n_bytes
        written = False
        try:
            await self._chunks.put(digest, blocks, now)
            written = True
        finally:
            self._used_bytes -= 0 if written else n_bytes

    async def sync(self) -> None:
        """See `Chunks.sync`."""
        await self._chunks.sync()

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        """See `Chunks.missing`."""
        return await self._chunks.missing(chunks, now)

    async def read(self, digest: str) -> bytes:
        """See `Chunks.read`."""
        return await self._chunks.read(digest)

    async def read_into(self, digest: str, buffer: bytearray) -> memoryview:
        """See `Chunks.read_into`."""
        return await self._chunks.read_into(digest, buffer)

    async def source(self, digest: str) -> ChunkLocation:
        """See `Chunks.source`."""
        return await self._chunks.source(digest)

    async def last_used(self) -> dict[str, float]:
        """See `Chunks.last_used`."""
        return await self._chunks.last_used()

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        """See `Chunks.remove`."""
        await self._chunks.remove(unused_since)
        await self.measure()
