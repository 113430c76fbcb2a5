"""Where a puller's blobs come from: the weight store alone, or peers and the store (see `peers.swarm`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import Bury, Corrupt
from shared.weights.cache import Cache
from shared.weights.client import StoreClient, persistently
from shared.weights.download import Download
from shared.weights.manifest import ChunkRef
from shared.weights.parallel import for_each
from shared.weights.peers.catalogue import Catalogue

Arrived = Callable[[ChunkRef, Exception | None], Awaitable[None]]
"""Called when a blob is in the cache; with an error when it cannot be had at all."""


@dataclass(slots=True)
class Traffic:
    """Bytes received, those in vain included."""

    from_store: int = 0
    from_peers: int = 0


class Source(Protocol):
    """Brings blobs into the cache."""

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, arrived: Arrived) -> None:
        """Bring every blob into the cache, in any order, and call `arrived` for each."""

    def offer(self, catalogues: Sequence[Catalogue]) -> None:
        """Serve what the cache holds of these catalogues to others, where this source has any."""


class StoreSource:
    """The weight store."""

    def __init__(self, client: StoreClient, cache: Cache, *, concurrency: int) -> None:
        """Use an open client, `concurrency` transfers at a time."""
        self._client = client
        self._cache = cache
        self._concurrency = concurrency

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, arrived: Arrived) -> None:
        """See `Source.fetch`."""

        async def bring(blob: ChunkRef) -> None:
            await arrived(blob, await self.bring(blob, traffic))

        await for_each(blobs, bring, concurrency=self._concurrency, name="weights-fetch")

    async def bring(self, blob: ChunkRef, traffic: Traffic) -> Exception | None:
        """Bring one blob into the cache; return why it cannot be had. Outlives the store's restarts."""
        for _ in range(2):
            download = Download(blob)
            try:
                await persistently(lambda: download.resume(self._client.chunk))  # noqa: B023 - awaited at once
            except (Bury, Corrupt) as error:
                return error
            finally:
                traffic.from_store += download.n_received
            if await asyncio.to_thread(self._cache.keep, blob, download.data):
                return None
        return Corrupt(f"weight store at {self._client.url}: blob {blob.digest} came twice with another digest")

    def offer(self, catalogues: Sequence[Catalogue]) -> None:
        """See `Source.offer`: nobody asks here."""
