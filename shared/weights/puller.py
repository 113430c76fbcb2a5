"""Pulling: a version comes into the cache, whole and verified, at the cost of what is not there yet.

The plan says for each chunk what is cheapest: it is held, or deltas lead to it from a chunk that is held, or it comes
whole. Chunks and deltas alike are blobs, which a `Source` brings; a chunk is rebuilt once its deltas are there. One
that does not come out right is fetched whole. What has come stays, so a pull that was cut off goes on from there.

Chunks of a version that is still being uploaded can be fetched ahead. A pull ends that, and takes what it brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import structlog

from shared.waiting import Waits
from shared.weights.assembly import Assembly, Transfer
from shared.weights.cache import Cache
from shared.weights.client import StoreClient, persistently
from shared.weights.drafts import Draft
from shared.weights.edges import VersionEdges
from shared.weights.manifest import ChunkRef, Manifest
from shared.weights.peers.catalogue import Catalogue
from shared.weights.plan import Way, plan
from shared.weights.prefetch import Prefetch
from shared.weights.pulled import PulledVersion
from shared.weights.source import Source, StoreSource

log = structlog.get_logger(__name__)

_KEPT_VERSIONS = 2
"""The version that is loaded, and the one that is to replace it."""

_SHARED_S = 5.0
"""How long a pull waits for transfers of its version that began ahead of it."""


Seed = Callable[[Manifest, Cache], int]
"""Puts chunks of a version into the cache that are on this machine already; returns how many. Blocks."""


@dataclass(slots=True)
class _Kept:
    manifest: Manifest
    deltas: set[str] = field(default_factory=set)
    """That were fetched for it; others may want them."""
    catalogues: list[Catalogue] = field(default_factory=list)


class Puller:
    """Fetches versions into a cache.

    What the last two pulls returned stays readable; chunks of older ones are removed.
    """

    def __init__(
        self,
        client: StoreClient,
        cache: Cache,
        waits: Waits,
        *,
        source: Source | None = None,
        seed: Seed | None = None,
        concurrency: int = 8,
        limit_s: float = 600.0,
    ) -> None:
        """Use an open client and a cache.

        Args:
            client: of the store that has the manifests.
            cache: which the puller closes.
            waits: where a pull under way is listed.
            source: of chunks and deltas; by default the same store.
            seed: where the first version of a job can be had without pulling it.
            concurrency: transfers at a time from the store, by default.
            limit_s: longest time for one pull, the store's absence included.

        """
        self._client = client
        self._store = f"the weight store at {client.url}"
        self._cache = cache
        self._waits = waits
        store = StoreSource(client, cache, concurrency=concurrency)
        self._source = source or store
        self._prefetch = Prefetch(store, cache)
        self._seed = seed
        self._seeded: dict[str, int] = {}
        """Job -> the version that the seed was asked for; -1 for none."""
        self._limit_s = limit_s
        self._kept: list[_Kept] = []
        self.last = Transfer()
        """Of the pull under way, or the last one."""
        self._one_at_a_time = asyncio.Lock()
        self._n_pulls = 0
        """Under way, or waiting for another one."""
        self._prefetching: asyncio.Timeout | None = None

    @property
    def prefetched_bytes(self) -> int:
        """Return how many bytes were received ahead of commits."""
        return self._prefetch.traffic.from_store

    def close(self) -> None:
        """Give the cache back."""
        self._cache.close()

    async def pull(self, job_id: str, version: int) -> PulledVersion:
        """Bring a committed version into the cache, and the version with its base model where it is an adapter.

        Raises:
            NotFound: the store does not have it (any more).
            Corrupt: what the store sent twice does not have its digest.
            Timeout: it took longer than the limit.
            Fatal: the cache's disk is full.

        """
        because = f"pull version {version} of job {job_id}"
        wait = self._waits.on(self._store, because=because, limit_s=self._limit_s)
        self._n_pulls += 1
        self._end_prefetch(job_id, version)
        try:
            async with wait, self._one_at_a_time:
                pulled = await self._pull(job_id, version)
        finally:
            self._n_pulls -= 1
        found: PulledVersion | None = None
        for kept in reversed(pulled):
            found = PulledVersion(kept.manifest, self._cache.blobs, base=found)
        assert found is not None
        return found

    async def prefetch(self, job_id: str, draft: Draft, chunks: Sequence[ChunkRef]) -> None:
        """Bring chunks that are new in the draft of a later version into the cache, beside no pull.

        Nothing is done before the first pull, which says how large a version is.

        Raises:
            Timeout: the store was away for too long.
            Fatal: the cache's disk is full.

        """
        while not await self._prefetched(job_id, draft, chunks):
            pass

    async def _prefetched(self, job_id: str, draft: Draft, chunks: Sequence[ChunkRef]) -> bool:
        """Return False when a pull ended it; the next call waits until that is over."""
        async with self._one_at_a_time:
            newest = self._kept[-1].manifest if self._kept else None
            if newest is None or newest.job_id != job_id or newest.version >= draft.version:
                return True
            if self._n_pulls:
                return False
            because = f"prefetch version {draft.version} of job {job_id}"
            timer = self._prefetching = asyncio.timeout(None)
            try:
                async with timer, self._waits.on(self._store, because=because, limit_s=self._limit_s):
                    await self._prefetch.bring(job_id, draft, chunks, newest.n_bytes)
            except TimeoutError:
                if not timer.expired():
                    raise
                return False
            finally:
                self._prefetching = None
        return not self._n_pulls

    def _end_prefetch(self, job_id: str, version: int) -> None:
        """Have a prefetch make room for a pull; what is under way of the same version ends first, if it is quick."""
        prefetching, self._prefetching = self._prefetching, None
        if prefetching is not None:
            wanted = self._prefetch.end(job_id, version)
            prefetching.reschedule(asyncio.get_running_loop().time() + (_SHARED_S if wanted else 0.0))

    async def _pull(self, job_id: str, version: int) -> list[_Kept]:
        """Return the version, and after it the one with its base model where it is an adapter."""
        self.last = Transfer()
        await self._sow(job_id)
        pulled = [await self._pull_one(job_id, version)]
        while (base := pulled[-1].manifest.base_version) is not None:
            pulled.append(self._find(job_id, base) or await self._pull_one(job_id, base))
        log.info("weights_pulled", job=job_id, version=version, **asdict(self.last))
        await self._keep(pulled)
        return pulled

    def _find(self, job_id: str, version: int) -> _Kept | None:
        name = (job_id, version)
        return next((kept for kept in self._kept if (kept.manifest.job_id, kept.manifest.version) == name), None)

    async def _sow(self, job_id: str) -> None:
        """Fill the cache with the oldest version of a job that has not been pulled here, as far as that is free."""
        if self._seed is None or job_id in self._seeded:
            return
        self._seeded[job_id] = -1
        if any(job == job_id for job, _ in self._cache.pulled()):
            return
        model = await persistently(lambda: self._client.model(job_id))
        if model is None or not model.versions:
            return
        oldest = model.versions[0].version
        manifest = await persistently(lambda: self._client.manifest(job_id, oldest))
        if await asyncio.to_thread(self._seed, manifest, self._cache):
            self._seeded[job_id] = oldest

    async def _pull_one(self, job_id: str, version: int) -> _Kept:
        manifest = await persistently(lambda: self._client.manifest(job_id, version))
        kept = _Kept(manifest)
        self.last.bytes_prefetched += self._prefetch.bytes_of(manifest.chunks())
        ways = await self._plan(kept)
        self._source.offer([catalogue for known in [*self._kept, kept] for catalogue in known.catalogues])
        await Assembly(self._source, self._cache, self.last).run(ways)
        kept.deltas = {edge.delta for way in ways for edge in way.path}
        return kept

    async def _plan(self, kept: _Kept) -> Sequence[Way]:
        manifest = kept.manifest
        wanted = list(manifest.chunks())
        listed = await asyncio.to_thread(self._cache.listed)
        kept.catalogues.append(Catalogue([chunk.digest for chunk in wanted]))
        documents: tuple[VersionEdges, ...] = ()
        if listed and any(chunk.digest not in listed for chunk in wanted):
            job_id, version, have = manifest.job_id, manifest.version, self._have(manifest)
            documents = await persistently(lambda: self._client.route(job_id, version, have))
            kept.catalogues += [
                Catalogue([edge.delta for edge in hop.edges]) for document in documents for hop in document.lists()
            ]
        edges = [edge for document in documents for edge in document.edges()]
        return (await asyncio.to_thread(plan, wanted, edges, listed)).ways

    def _have(self, manifest: Manifest) -> int:
        """Return the newest version before this one that was pulled, by an earlier process too."""
        known = [(kept.manifest.job_id, kept.manifest.version) for kept in self._kept] or self._cache.pulled()
        have = [version for job_id, version in known if job_id == manifest.job_id and version < manifest.version]
        seeded = self._seeded.get(manifest.job_id, -1)
        # Not known: the version before it is a guess that costs nothing.
        return max(have, default=seeded if seeded >= 0 else manifest.version - 1)

    async def _keep(self, pulled: list[_Kept]) -> None:
        """Keep what was pulled now, and as much of what was pulled before as fits."""
        version, *bases = pulled
        versions = [kept for kept in self._kept if kept.manifest.digest != version.manifest.digest]
        recent = [*versions, version][-_KEPT_VERSIONS:]
        self._kept = [*(base for base in bases if base not in recent), *recent]
        keep = {chunk.digest for kept in self._kept for chunk in kept.manifest.chunks()}
        deltas = {delta for kept in self._kept for delta in kept.deltas}
        ahead = self._prefetch.pulled(version.manifest.job_id, version.manifest.version, keep)
        names = [(kept.manifest.job_id, kept.manifest.version) for kept in self._kept]
        await asyncio.to_thread(self._cache.prune, keep | deltas | ahead, names)
