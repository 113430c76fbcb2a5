"""Assembles the chunks of a version from held chunks, deltas and whole chunks, according to its plan."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from rlboost.shared.errors import Unprocessable
from rlboost.shared.weights import codec
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.manifest import ChunkRef
from rlboost.shared.weights.parallel import for_each
from rlboost.shared.weights.plan import ChunkPlan
from rlboost.shared.weights.source import Source, Traffic

log = structlog.get_logger(__name__)

_MAX_CONCURRENT = 4
"""Held chunks verified concurrently."""


@dataclass(slots=True)
class PullStats(Traffic):
    """Statistics of one pull. `bytes_dense` and `bytes_delta` count every blob once."""

    bytes_dense: int = 0
    bytes_delta: int = 0
    chunks_held: int = 0
    chunks_dense: int = 0
    chunks_delta: int = 0
    fallbacks: int = 0
    """Chunks fetched whole because their deltas failed."""


class Assembly:
    """The assembly of one version's chunks in the cache."""

    def __init__(self, source: Source, cache: Cache, stats: PullStats) -> None:
        """Fetch from `source` into `cache`, and add to the statistics in `stats`."""
        self._source = source
        self._cache = cache
        self._stats = stats
        self._users: defaultdict[str, list[ChunkPlan]] = defaultdict(list)
        """Delta -> the plans that use it."""
        self._n_missing: dict[str, int] = {}
        """Chunk -> number of its deltas not yet in the cache."""
        self._dense: list[ChunkRef] = []

    async def run(self, chunk_plans: Sequence[ChunkPlan]) -> None:
        """Bring the chunk of every plan into the cache.

        Raises:
            NotFound: a chunk that is fetched whole does not exist (any more).
            Corrupt: a chunk that is fetched whole does not have its digest.

        """
        await for_each(chunk_plans, self._classify, concurrency=_MAX_CONCURRENT, name="weights-classify")
        for chunk_plan in chunk_plans:
            if chunk_plan.path and self._n_missing.get(chunk_plan.chunk.digest) == 0:
                await self._rebuild(chunk_plan)
        deltas = {
            edge.delta: edge.blob for users in self._users.values() for chunk_plan in users for edge in chunk_plan.path
        }
        dense, self._dense = self._dense, []
        needed = [*(deltas[digest] for digest in self._users), *dense]
        await self._source.fetch(needed, self._stats, self._arrived)
        if self._dense:
            await self._source.fetch(self._dense, self._stats, self._arrived)

    async def _classify(self, chunk_plan: ChunkPlan) -> None:
        """Check what is in the cache already, and queue the rest."""
        if chunk_plan.held:
            if await asyncio.to_thread(self._cache.holds, chunk_plan.chunk):
                self._stats.chunks_held += 1
                return
            self._dense.append(chunk_plan.chunk)
        elif not chunk_plan.path:
            self._dense.append(chunk_plan.chunk)
        else:
            lacking = [edge for edge in chunk_plan.path if not await asyncio.to_thread(self._cache.holds, edge.blob)]
            self._n_missing[chunk_plan.chunk.digest] = len(lacking)
            for edge in lacking:
                self._users[edge.delta].append(chunk_plan)

    async def _arrived(self, blob: ChunkRef, error: Exception | None) -> None:
        users = self._users.pop(blob.digest, None)
        if users is None:
            if error is not None:
                raise error
            self._stats.bytes_dense += blob.n_bytes
            self._stats.chunks_dense += 1
            return
        if error is None:
            self._stats.bytes_delta += blob.n_bytes
        for chunk_plan in users:
            if error is not None:
                self._fall_back(chunk_plan, error)
            elif chunk_plan.chunk.digest in self._n_missing:  # False after a fallback for another delta
                self._n_missing[chunk_plan.chunk.digest] -= 1
                if self._n_missing[chunk_plan.chunk.digest] == 0:
                    await self._rebuild(chunk_plan)

    async def _rebuild(self, chunk_plan: ChunkPlan) -> None:
        try:
            is_correct = await asyncio.to_thread(self._rebuilt, chunk_plan)
        except (Unprocessable, FileNotFoundError) as error:
            self._fall_back(chunk_plan, error)
            return
        if is_correct:
            self._stats.chunks_delta += 1
        else:
            self._fall_back(chunk_plan, ValueError("the result has another digest"))

    def _rebuilt(self, chunk_plan: ChunkPlan) -> bool:
        data = self._cache.read(chunk_plan.path[0].base)
        for edge in chunk_plan.path:
            codec.apply_into(data, self._cache.path(edge.delta).read_bytes())
        return self._cache.store(chunk_plan.chunk, data)

    def _fall_back(self, chunk_plan: ChunkPlan, error: Exception) -> None:
        """Queue a chunk to be fetched whole, at most once."""
        if self._n_missing.pop(chunk_plan.chunk.digest, None) is None:
            return
        self._stats.fallbacks += 1
        self._dense.append(chunk_plan.chunk)
        log.warning("delta_failed", chunk=chunk_plan.chunk.digest, error=str(error))
