"""A weight store without a process: a `StoreClient` that calls the store's own code, and versions of random bytes."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from services.weight_store.fakes import MemoryChunks, MemoryDocuments
from shared.errors import NotFound
from shared.weights.client import StoreClient
from shared.weights.drafts import DraftNews, DraftPart
from shared.weights.edges import VersionEdges
from shared.weights.manifest import ChunkRef, Manifest, Part
from shared.weights.publisher import Publisher, Shard
from shared.weights.wire import CommitRequest, ModelInfo, VersionInfo
from tests.support.tiny_versions import JOB, store_on

CHUNK_BYTES = 1000


class MemoryStore(StoreClient):
    """Every store that a test needs: it can hang, and it can forget."""

    def __init__(self) -> None:
        super().__init__("http://nowhere:1", "a token for tests")
        self.chunks = MemoryChunks()
        self._documents = MemoryDocuments()
        self._processes = itertools.count(1)
        self.restart()
        self.sent: list[str] = []
        """Digests of the chunks that somebody fetched."""
        self.may_send = asyncio.Event()
        """While not set, chunks that are asked for do not come."""
        self.may_send.set()
        self.n_asked = 0
        self.asked = asyncio.Event()
        """Set when somebody asks for a chunk."""
        self.draft_error: Exception | None = None

    def restart(self) -> None:
        """Forget what is in memory only."""
        now_s = 1_000_000 * next(self._processes)
        self.app = store_on(self.chunks, self._documents, keep_versions=4, now_s=now_s)

    async def head(self, job_id: str) -> VersionInfo | None:
        raise NotImplementedError

    async def model(self, job_id: str) -> ModelInfo | None:
        return None

    async def manifest(self, job_id: str, version: int) -> Manifest:
        return Manifest.decode((await self.app.manifest(job_id, version))[0])

    async def route(self, job_id: str, version: int, have: int) -> tuple[VersionEdges, ...]:
        return ()

    async def missing(self, chunks: Iterable[ChunkRef]) -> frozenset[str]:
        return frozenset(await self.app.missing(list(chunks)))

    async def put_chunk(self, chunk: ChunkRef, data: memoryview) -> None:
        await self.app.put_chunk(chunk.digest, [bytes(data)])

    @asynccontextmanager
    async def chunk(self, digest: str, start: int) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        self.asked.set()
        self.n_asked += 1
        await self.may_send.wait()
        data = await self.chunks.read(digest)
        self.sent.append(digest)

        async def blocks() -> AsyncIterator[bytes]:
            yield data[start:]

        yield start, blocks()

    async def put_part(self, job_id: str, version: int, part: Part) -> None:
        await self.app.put_part(job_id, version, part.rank, part.encode())

    async def put_draft(self, job_id: str, version: int, part: DraftPart) -> None:
        if self.draft_error is not None:
            raise self.draft_error
        self.app.put_draft(job_id, version, part)

    async def draft(self, job_id: str, *, after: int, wait_s: float) -> DraftNews:
        return await self.app.drafts.news(job_id, after, wait_s)

    async def commit(self, job_id: str, version: int, request: CommitRequest) -> VersionInfo:
        found = await self.app.commit(job_id, version, request)
        return VersionInfo(
            version=found.version, digest=found.digest, n_bytes=found.n_bytes, committed_at=0.0, pinned=False
        )

    def gone(self, digest: str) -> None:
        """Lose a chunk."""
        if self.chunks.held.pop(digest, None) is None:
            raise NotFound(digest)


def shards(seed: int, n_chunks: int = 40) -> list[Shard]:
    """Return the weights of that many chunks, others for each seed."""
    data = random.Random(seed).randbytes(n_chunks * CHUNK_BYTES)
    return [Shard("w", "uint8", (len(data),), (0,), (len(data),), data)]


async def commit(publisher: Publisher, version: int, part: Part) -> None:
    """Make a part a version."""
    await publisher.commit(JOB, version, expect=version - 1, part_digests=[part.digest], config_json="{}")
