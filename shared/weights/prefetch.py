"""Fetching ahead: chunks of a version come into the cache before anybody commits it.

What comes is verified as in a pull, and is loaded only if the manifest names it. All that is at stake is bytes: no more
of them than the version that was pulled last has, and only while the disk has room for a whole version besides.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import structlog

from shared.weights.cache import Cache
from shared.weights.drafts import Draft
from shared.weights.manifest import ChunkRef
from shared.weights.parallel import for_each
from shared.weights.source import StoreSource, Traffic

log = structlog.get_logger(__name__)

CONCURRENCY = 8
"""Transfers at a time: as many as a publisher has, so that what arrives together is fetched together."""


class Prefetch:
    """What is in a cache of one version that was not pulled. One call at a time, and none beside a pull."""

    def __init__(self, source: StoreSource, cache: Cache) -> None:
        """Fetch from the store alone: peers cannot know yet which chunks to look for."""
        self._source = source
        self._cache = cache
        self.traffic = Traffic()
        """Of all calls."""
        self._of: tuple[str, int] | None = None
        """(job, version)."""
        self._brought: dict[str, int] = {}
        """Digest -> bytes of what came, none of it in a version that was pulled."""
        self._complained = False
        self._ending = False

    def end(self, job_id: str, version: int) -> bool:
        """Have the call under way begin no more transfers; tell whether those that it has are of this version."""
        self._ending = True
        return self._of == (job_id, version)

    async def bring(self, job_id: str, draft: Draft, chunks: Sequence[ChunkRef], limit_bytes: int) -> None:
        """Bring chunks into the cache, as far as there is room.

        Args:
            job_id: whose weights.
            draft: what is known of the version.
            chunks: what is new in it.
            limit_bytes: of what was brought and not pulled.

        """
        if self._of != (job_id, draft.version):
            # What came of another version stays until a pull has it removed, and counts until then.
            self._of, self._complained = (job_id, draft.version), False
        unseen = [chunk for chunk in chunks if chunk.digest not in self._cache.verified]
        held = [chunk for chunk in unseen if await asyncio.to_thread(self._cache.holds, chunk)]
        self._brought |= {chunk.digest: chunk.n_bytes for chunk in held}
        lacking = [chunk for chunk in unseen if chunk.digest not in self._brought]
        fitting = fit(lacking, await self._room(limit_bytes))
        if len(fitting) < len(lacking):
            await self._remove_all_but({chunk.digest for chunk in draft.chunks()})
            fitting = fit(lacking, await self._room(limit_bytes))
        errors: list[str] = []
        self._ending = False

        async def bring(chunk: ChunkRef) -> None:
            if (error := await self._source.bring(chunk, self.traffic)) is None:
                self._brought[chunk.digest] = chunk.n_bytes
            else:
                errors.append(str(error))

        await for_each(self._until_end(fitting), bring, concurrency=CONCURRENCY, name="weights-prefetch")
        if len(fitting) < len(lacking):
            errors.append(f"no room for more: {limit_bytes} bytes are fetched ahead at most, and as many stay free")
        if errors and not self._complained:
            self._complained = True
            log.warning("prefetch_incomplete", job=job_id, version=draft.version, error=errors[0])

    def bytes_of(self, chunks: Iterable[ChunkRef]) -> int:
        """Return how many bytes of these chunks came ahead."""
        return sum(self._brought.get(chunk.digest, 0) for chunk in chunks)

    def pulled(self, job_id: str, version: int, kept: AbstractSet[str]) -> set[str]:
        """Return the digests that are to stay though no version kept has them: those of a later version.

        Args:
            job_id: whose weights were pulled.
            version: that was pulled.
            kept: digests of all versions that are kept.

        """
        if self._of is None or self._of[0] != job_id or self._of[1] <= version:
            self._of, self._brought = None, {}
        self._brought = {digest: n_bytes for digest, n_bytes in self._brought.items() if digest not in kept}
        return set(self._brought)

    def _until_end(self, chunks: Iterable[ChunkRef]) -> Iterator[ChunkRef]:
        for chunk in chunks:
            if self._ending:
                return
            yield chunk

    async def _room(self, limit_bytes: int) -> int:
        free = (await asyncio.to_thread(shutil.disk_usage, self._cache.blobs)).free
        return min(limit_bytes - sum(self._brought.values()), free - limit_bytes)

    async def _remove_all_but(self, digests: AbstractSet[str]) -> None:
        """Remove what came and is not wanted now: of a publisher that died, say."""
        others = self._brought.keys() - digests
        await asyncio.to_thread(self._cache.remove, others)
        self._brought = {digest: n_bytes for digest, n_bytes in self._brought.items() if digest not in others}


def fit(chunks: Sequence[ChunkRef], room_bytes: int) -> list[ChunkRef]:
    """Return the first chunks that fit."""
    fitting = []
    for chunk in chunks:
        room_bytes -= chunk.n_bytes
        if room_bytes < 0:
            break
        fitting.append(chunk)
    return fitting
