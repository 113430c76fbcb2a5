"""Chunks as the store counts them, and what it does with damaged ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.services.weight_store.ports import ChunkLocation, Chunks, Documents, StoreFull
from rlboost.shared.errors import NotFound, StoreUnavailable
from rlboost.shared.weights.manifest import ChunkRef, Manifest, digest_of

log = structlog.get_logger(__name__)

# --- Finds chunks that are damaged on the store's disk, so that a publisher can upload them again ---------------------
# A puller that receives a chunk with another digest has it verified, and a damaged chunk is removed. Until it is
# uploaded again, requests of a chunk that a retained version needs are answered with 503, so pullers wait for it.


class DamagedChunks:
    """Chunks that retained versions need and the store lacks, among those that were requested."""

    def __init__(self, chunks: Chunks, documents: Documents) -> None:
        self._chunks = chunks
        self._documents = documents
        self._missing: set[str] = set()
        self._needed: dict[tuple[str, str], frozenset[str]] = {}
        """(job, digest of a manifest) -> its chunks."""

    def missing(self) -> list[str]:
        """Return the digests of chunks to be uploaded again."""
        return sorted(self._missing)

    def on_uploaded(self, digest: str) -> None:
        """Record that the store has a chunk."""
        self._missing.discard(digest)

    async def verify(self, digest: str) -> bool:
        """Return True if a chunk is intact; remove it if it is not."""
        try:
            data = await self._chunks.read(digest)
        except NotFound:
            return False
        if await asyncio.to_thread(digest_of, data) == digest:
            return True
        log.error("chunk_corrupt", chunk=digest, n_bytes=len(data))
        await self._chunks.remove({digest: math.inf})
        return False

    async def check_needed(self, digest: str, jobs: Sequence[JobVersions]) -> None:
        """Check that no retained version needs a chunk that the store lacks.

        Raises:
            StoreUnavailable: a version needs it: it must be uploaded again.

        """
        versions = {(job.job_id, version.digest): version for job in jobs for version in job.versions}
        self._needed = {name: chunks for name, chunks in self._needed.items() if name in versions}
        for (job_id, manifest_digest), version in versions.items():
            name = job_id, manifest_digest
            if name not in self._needed:
                data = await self._documents.manifest(job_id, version.version)
                manifest = await asyncio.to_thread(Manifest.decode, data)
                self._needed[name] = frozenset(chunk.digest for chunk in manifest.chunks())
            if digest in self._needed[name]:
                self._missing.add(digest)
                raise StoreUnavailable(
                    f"chunk {digest} of version {version.version} of job {job_id} is damaged or lost: the job's "
                    "trainer uploads it again while it has the weights of this version"
                )


# --- Limits the total size of the chunks: a write that would exceed it is rejected before the disk is full ------------


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
        return await self._chunks.n_bytes()

    async def put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
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
        await self._chunks.sync()

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        return await self._chunks.missing(chunks, now)

    async def read(self, digest: str) -> bytes:
        return await self._chunks.read(digest)

    async def read_into(self, digest: str, buffer: bytearray) -> memoryview:
        return await self._chunks.read_into(digest, buffer)

    async def source(self, digest: str) -> ChunkLocation:
        return await self._chunks.source(digest)

    async def last_used(self) -> dict[str, float]:
        return await self._chunks.last_used()

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        await self._chunks.remove(unused_since)
        await self.measure()
