"""Takes chunks from the weight store's own files when this machine shares its file system."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from rlboost.shared.errors import NotFound, StoreUnavailable
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import ChunkRef
from rlboost.shared.weights.parallel import for_each
from rlboost.shared.weights.peers.blob_index import BlobIndex
from rlboost.shared.weights.rest_models import ChunkDirectory
from rlboost.shared.weights.source import OnSettled, Source, Traffic

log = structlog.get_logger(__name__)

_MAX_CONCURRENT = 4


class DirectorySource:
    """`Source` that links or copies verified files of the weight store, and fetches the rest from another source.

    The store says where its files are and what its file `nonce` contains. A machine that reads the same nonce at that
    path shares the directory. Every blob is digest-checked, so a wrong answer costs only time.
    """

    def __init__(self, client: StoreClient, cache: Cache, other: Source) -> None:
        """Use an open client; `other` fetches what is not in a shared directory."""
        self._client = client
        self._cache = cache
        self._other = other

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, on_settled: OnSettled) -> None:
        """See `Source.fetch`."""
        if not blobs:
            return
        if (directory := await self._shared()) is None:
            await self._other.fetch(blobs, traffic, on_settled)
            return
        rest: list[ChunkRef] = []

        async def take(blob: ChunkRef) -> None:
            path = directory.chunk(blob.digest)
            if not rest and not await asyncio.to_thread(path.exists):
                with suppress(StoreUnavailable, NotFound):
                    await self._client.prepare(blob.digest)
            if await asyncio.to_thread(self._cache.adopt, blob, path):
                traffic.from_directory += blob.n_bytes
                await on_settled(blob, None)
            else:
                rest.append(blob)

        await for_each(blobs, take, concurrency=_MAX_CONCURRENT, name="weights-directory")
        if rest:
            log.warning("chunks_not_in_directory", path=directory.path, chunks=len(rest))
            await self._other.fetch(rest, traffic, on_settled)

    async def has_chunks_at_hand(self) -> bool:
        """See `Source.has_chunks_at_hand`."""
        return await self._shared() is not None

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
        """See `Source.offer`."""
        self._other.offer(indexes)

    async def _shared(self) -> ChunkDirectory | None:
        """Return the store's directory if this machine shares it. A restarted store has another nonce."""
        try:
            directory = await self._client.directory()
        except StoreUnavailable:
            return None  # the other source waits for the store
        if directory is None:
            return None
        is_shared = await asyncio.to_thread(directory.is_shared)
        return directory if is_shared else None
