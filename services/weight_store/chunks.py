"""Chunks as the store counts them, those that it derives from deltas, and what it does with damaged ones."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.services.weight_store.ports import BadChunk, ChunkLocation, Chunks, Documents, Proxied, StoreFull
from rlboost.shared.errors import NotFound, StoreUnavailable, Unprocessable
from rlboost.shared.weights.delta import apply_delta
from rlboost.shared.weights.delta_graph import Edge
from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, Manifest, digest_of
from rlboost.shared.weights.transfer import Buffers

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


# --- Derived chunks ---------------------------------------------------------------------------------------------------
# Chunks that a committed version needs and that exist only as base and delta until they are written.
#
# Lifecycle: `derive` applies the delta and verifies the digest before the commit; `write` stores the file afterwards,
# in the background or at the first read. Base and delta are retained until then. A derived base is written first, so a
# chunk is never more than one delta away from a file. Results stay in memory up to a limit; the others, and all after a
# restart, are derived again from the edges of the versions (`Deltas.restore`). If the disk is full, readers get the
# result without a file. A derived chunk that no version and no upload in progress needs is dropped.


MAX_BYTES_IN_MEMORY = 256 << 20
"""Results retained in memory until they are written; those beyond the limit are derived again."""


@dataclass(slots=True, eq=False)
class _Derived:
    edge: Edge
    n_bytes: int
    used_at: float
    """Time of last use. The file gets it too, so that collection treats it like a chunk uploaded before the commit."""
    data: bytes = b""
    """The chunk, if it is in memory."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Unwritten(NamedTuple):
    """A derived chunk for which there is no space."""

    data: bytes
    error: StoreFull


class DerivedChunks:
    """`ports.Chunks`, and chunks derived from them that are not yet written."""

    def __init__(self, chunks: Chunks, max_bytes_in_memory: int = MAX_BYTES_IN_MEMORY) -> None:
        """Write to `chunks`; retain results of deltas up to a limit until they are written."""
        self._chunks = chunks
        self._max_bytes_in_memory = max_bytes_in_memory
        self._derived: dict[str, _Derived] = {}
        self._bytes_in_memory = 0
        self._buffers = Buffers()

    def __len__(self) -> int:
        """Return the number of derived chunks that are not written."""
        return len(self._derived)

    async def derive(self, edge: Edge, now: float) -> None:
        """Add the chunk that an edge leads to, verified but not written.

        Raises:
            NotFound: the base or the delta is missing.
            Unprocessable: the result does not have the digest.
            StoreFull: the base is derived itself, and there is no space to write it.

        """
        if edge.base in self._derived:
            await self.write(edge.base)
        async with self._applied(edge) as data:
            if await asyncio.to_thread(digest_of, data) != edge.new:
                raise BadChunk(f"the delta {edge.delta} does not lead from {edge.base} to this chunk")
            if await self._chunks.missing([ChunkRef(edge.new, len(data))], now):
                derived = self.add(edge, len(data), now)
                if not derived.data and self._bytes_in_memory + len(data) <= self._max_bytes_in_memory:
                    derived.data = bytes(data)
                    self._bytes_in_memory += len(data)

    def add(self, edge: Edge, n_bytes: int, used_at: float) -> _Derived:
        """Add the chunk that an edge leads to, which was verified before; an existing one is marked as used."""
        derived = self._derived.setdefault(edge.new, _Derived(edge, n_bytes, used_at))
        derived.used_at = max(derived.used_at, used_at)
        return derived

    def inputs(self) -> set[str]:
        """Return the digests of the bases and deltas of all derived chunks."""
        return {digest for derived in self._derived.values() for digest in (derived.edge.base, derived.edge.delta)}

    def derived_last_used(self) -> dict[str, float]:
        """Return digest -> time of last use, for all derived chunks."""
        return {digest: derived.used_at for digest, derived in self._derived.items()}

    def drop(self, digests: Iterable[str]) -> None:
        """Drop derived chunks, except those being written: they become files, which can be removed later."""
        for digest in digests:
            if digest in self._derived and not self._derived[digest].lock.locked():
                self._forget(digest)

    def without_recorded_edge(self, chunks: Iterable[ChunkRef], recorded: Container[Edge]) -> list[str]:
        """Return the digests of those of `chunks` that are derived by an edge that is not among the recorded ones."""
        found = ((chunk.digest, self._derived.get(chunk.digest)) for chunk in chunks)
        return [digest for digest, derived in found if derived is not None and derived.edge not in recorded]

    async def write(self, digest: str) -> None:
        """Write a derived chunk; does nothing if it is written.

        Raises:
            NotFound: its base or delta is lost or damaged.
            StoreFull: the disk is full.

        """
        if (unwritten := await self._write(digest)) is not None:
            raise unwritten.error

    async def _write(self, digest: str) -> _Unwritten | None:
        """Write a derived chunk; return it if the disk is full, None if it is written; raises `NotFound`."""
        if (derived := self._derived.get(digest)) is None:
            return None
        async with derived.lock:
            if self._derived.get(digest) is not derived:
                return None
            try:
                async with self._derived_bytes(derived) as data:
                    try:
                        await self._chunks.put(digest, [data], derived.used_at)  # checks the digest
                    except StoreFull as error:
                        if await asyncio.to_thread(digest_of, data) != digest:
                            raise BadChunk("base or delta is damaged") from error
                        return _Unwritten(bytes(data), error)
            except (NotFound, Unprocessable) as error:
                self._forget(digest)
                log.error("derived_chunk_lost", chunk=digest, base=derived.edge.base, error=str(error))  # noqa: TRY400 - the cause is in the message; a traceback adds nothing
                raise NotFound(f"chunk {digest} cannot be derived any more: {error}") from error
            self._forget(digest)
            return None

    async def write_each(self, digests: Iterable[str]) -> None:
        """Write derived chunks; those whose base or delta is lost become missing.

        Raises:
            StoreFull: the disk is full.

        """
        for digest in digests:
            with suppress(NotFound):
                await self.write(digest)

    async def write_all(self, stop: asyncio.Event) -> None:
        """Write the derived chunks, one after the other, until the stop.

        Raises:
            StoreFull: the disk is full.

        """
        await self.write_each(itertools.takewhile(lambda _: not stop.is_set(), list(self._derived)))

    def _forget(self, digest: str) -> None:
        if (derived := self._derived.pop(digest, None)) is not None:
            self._bytes_in_memory -= len(derived.data)

    @asynccontextmanager
    async def _derived_bytes(self, derived: _Derived) -> AsyncIterator[bytes | memoryview]:
        if derived.data:
            yield derived.data
        else:
            async with self._applied(derived.edge) as data:
                yield data

    @asynccontextmanager
    async def _applied(self, edge: Edge) -> AsyncIterator[memoryview]:
        """Yield the chunk that results from an edge's delta and base; its buffer is used again after the `with` block.

        Raises:
            NotFound: base or delta is missing.
            Unprocessable: the delta is damaged.

        """
        buffer = self._buffers.take(CHUNK_BYTES)
        data = await self._chunks.read_into(edge.base, buffer)
        await asyncio.to_thread(apply_delta, data, await self._chunks.read(edge.delta))
        yield data
        self._buffers.give_back(buffer)  # not after an error: a thread may still write to it

    async def put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
        await self._chunks.put(digest, blocks, now)
        self._forget(digest)

    async def sync(self) -> None:
        await self._chunks.sync()

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        for chunk in chunks:
            if derived := self._derived.get(chunk.digest):
                derived.used_at = now
        return await self._chunks.missing([chunk for chunk in chunks if not self._derives(chunk)], now)

    def _derives(self, chunk: ChunkRef) -> bool:
        derived = self._derived.get(chunk.digest)
        return derived is not None and derived.n_bytes == chunk.n_bytes

    async def read(self, digest: str) -> bytes:
        """See `Chunks.read`. A derived chunk is written first."""
        if (unwritten := await self._write(digest)) is not None:
            return unwritten.data
        return await self._chunks.read(digest)

    async def read_into(self, digest: str, buffer: bytearray) -> memoryview:
        """See `Chunks.read_into`. A derived chunk is written first."""
        if (unwritten := await self._write(digest)) is not None:
            return memoryview(bytearray(unwritten.data))
        return await self._chunks.read_into(digest, buffer)

    async def source(self, digest: str) -> ChunkLocation:
        """See `Chunks.source`. A derived chunk is written first."""
        if (unwritten := await self._write(digest)) is not None:
            data = unwritten.data
            return Proxied(len(data), lambda start, stop: _single_block(data[start:stop]))
        return await self._chunks.source(digest)

    async def n_bytes(self) -> int:
        return await self._chunks.n_bytes()

    async def last_used(self) -> dict[str, float]:
        """See `Chunks.last_used`; without derived chunks."""
        return await self._chunks.last_used()

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        await self._chunks.remove(unused_since)


async def _single_block(data: bytes) -> AsyncIterator[bytes]:
    async def block() -> AsyncIterator[bytes]:
        yield data

    return block()
