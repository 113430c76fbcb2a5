"""Assembling: the chunks of a version from what is held, from deltas and from whole chunks, as the plan says."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from shared.errors import Bury
from shared.weights import codec
from shared.weights.cache import Cache
from shared.weights.manifest import ChunkRef
from shared.weights.parallel import for_each
from shared.weights.plan import Way
from shared.weights.source import Source, Traffic

log = structlog.get_logger(__name__)

_AT_A_TIME = 4
"""Held chunks that are verified at a time."""


@dataclass(slots=True)
class Transfer(Traffic):
    """What one pull took. The bytes of chunks and deltas are those of the blobs, each once."""

    bytes_dense: int = 0
    bytes_delta: int = 0
    bytes_prefetched: int = 0
    """Of chunks that came before the commit; they are held too."""
    chunks_held: int = 0
    chunks_dense: int = 0
    chunks_delta: int = 0
    fallbacks: int = 0
    """Chunks that came whole because they did not come out of their deltas."""


class Assembly:
    """One version's chunks on their way into the cache."""

    def __init__(self, source: Source, cache: Cache, transfer: Transfer) -> None:
        """Count into `transfer`."""
        self._source = source
        self._cache = cache
        self._transfer = transfer
        self._users: defaultdict[str, list[Way]] = defaultdict(list)
        """Delta -> ways that it is part of."""
        self._lacking: dict[str, int] = {}
        """Chunk -> deltas that are still to come."""
        self._dense: list[ChunkRef] = []

    async def run(self, ways: Sequence[Way]) -> None:
        """Bring every way's chunk into the cache.

        Raises:
            NotFound: a chunk that has to come whole is not there (any more).
            Corrupt: it does not have its digest.

        """
        await for_each(ways, self._look, concurrency=_AT_A_TIME, name="weights-look")
        for way in ways:
            if way.path and self._lacking.get(way.chunk.digest) == 0:
                await self._rebuild(way)
        deltas = {edge.delta: edge.blob for users in self._users.values() for way in users for edge in way.path}
        dense, self._dense = self._dense, []
        wanted = [*(deltas[digest] for digest in self._users), *dense]
        await self._source.fetch(wanted, self._transfer, self._arrived)
        if self._dense:
            await self._source.fetch(self._dense, self._transfer, self._arrived)

    async def _look(self, way: Way) -> None:
        """See what of a way is here already."""
        if way.held:
            if await asyncio.to_thread(self._cache.holds, way.chunk):
                self._transfer.chunks_held += 1
                return
            self._dense.append(way.chunk)
        elif not way.path:
            self._dense.append(way.chunk)
        else:
            lacking = [edge for edge in way.path if not await asyncio.to_thread(self._cache.holds, edge.blob)]
            self._lacking[way.chunk.digest] = len(lacking)
            for edge in lacking:
                self._users[edge.delta].append(way)

    async def _arrived(self, blob: ChunkRef, error: Exception | None) -> None:
        users = self._users.pop(blob.digest, None)
        if users is None:
            if error is not None:
                raise error
            self._transfer.bytes_dense += blob.n_bytes
            self._transfer.chunks_dense += 1
            return
        if error is None:
            self._transfer.bytes_delta += blob.n_bytes
        for way in users:
            if error is not None:
                self._fall_back(way, error)
            elif way.chunk.digest in self._lacking:  # not fallen back for want of another delta
                self._lacking[way.chunk.digest] -= 1
                if self._lacking[way.chunk.digest] == 0:
                    await self._rebuild(way)

    async def _rebuild(self, way: Way) -> None:
        try:
            right = await asyncio.to_thread(self._rebuilt, way)
        except (Bury, FileNotFoundError) as error:
            self._fall_back(way, error)
            return
        if right:
            self._transfer.chunks_delta += 1
        else:
            self._fall_back(way, ValueError("the result has another digest"))

    def _rebuilt(self, way: Way) -> bool:
        data = self._cache.path(way.path[0].base).read_bytes()
        for edge in way.path:
            data = codec.apply(data, self._cache.path(edge.delta).read_bytes())
        return self._cache.keep(way.chunk, data)

    def _fall_back(self, way: Way, error: Exception) -> None:
        """Have a chunk come whole after all, once."""
        if self._lacking.pop(way.chunk.digest, None) is None:
            return
        self._transfer.fallbacks += 1
        self._dense.append(way.chunk)
        log.warning("delta_failed", chunk=way.chunk.digest, error=str(error))
