"""Sources of blobs for a puller: the weight store alone, or peers and the store (see `peers.source`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from rlboost.shared.errors import Corrupt, NotFound, Unprocessable
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.manifest import ChunkRef
from rlboost.shared.weights.parallel import for_each
from rlboost.shared.weights.peers.blob_index import BlobIndex
from rlboost.shared.weights.transfer.download import Buffers, Download

log = structlog.get_logger(__name__)

OnSettled = Callable[[ChunkRef, Exception | None], Awaitable[None]]
"""Called when a blob is in the cache, or with an error when it cannot be obtained."""


@dataclass(slots=True)
class Traffic:
    """Bytes received, including those of failed transfers."""

    from_store: int = 0
    from_peers: int = 0
    from_directory: int = 0
    """Taken from the weight store's own files."""


class Source(Protocol):
    """Fetches blobs into the cache."""

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, on_settled: OnSettled) -> None:
        """Fetch every blob into the cache, in any order, and call `on_settled` for each."""

    async def has_chunks_at_hand(self) -> bool:
        """Return True if whole chunks cost less than the deltas that lead to them."""

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
        """Announce to peers which blobs of these indexes the cache holds; does nothing without peers."""


class StoreSource:
    """`Source` that fetches everything from the weight store."""

    def __init__(self, client: StoreClient, cache: Cache, *, concurrency: int) -> None:
        """Use an open client; run `concurrency` transfers at a time."""
        self._client = client
        self._cache = cache
        self._concurrency = concurrency
        self._buffers = Buffers()

    async def fetch(self, blobs: Sequence[ChunkRef], traffic: Traffic, on_settled: OnSettled) -> None:
        """See `Source.fetch`."""

        async def settle(blob: ChunkRef) -> None:
            await on_settled(blob, await self.fetch_one(blob, traffic))

        await for_each(blobs, settle, concurrency=self._concurrency, name="weights-fetch")

    async def fetch_one(self, blob: ChunkRef, traffic: Traffic) -> Exception | None:
        """Fetch one blob into the cache; return the error if it cannot be obtained.

        Waits for an unavailable store, and for a publisher to upload a chunk again that is damaged in the store.
        """
        for _ in range(2):
            download = Download(blob, self._buffers)
            keep = partial(self._cache.store, blob, download.data)
            try:
                is_stored = await retry_unavailable(partial(self._client.fetch, download, keep))
            except Corrupt as error:
                download.release()
                log.warning("chunk_unusable", chunk=blob.digest, reason=str(error))
            except (NotFound, Unprocessable) as error:
                download.release()
                return error
            else:
                download.release()
                if is_stored:
                    return None
            finally:
                traffic.from_store += download.n_received
            if not await retry_unavailable(lambda: self._client.verify(blob.digest)):
                log.warning("chunk_damaged_in_store", chunk=blob.digest)
        return Corrupt(f"weight store at {self._client.url}: blob {blob.digest} arrived twice with another digest")

    async def has_chunks_at_hand(self) -> bool:
        """See `Source.has_chunks_at_hand`."""
        return False

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
        """Do nothing: this source has no peers."""
