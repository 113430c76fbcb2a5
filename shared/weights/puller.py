"""Pulls a version into the cache, whole and verified, and fetches only what is missing.

For each chunk a plan selects the cheapest option: it is held, deltas lead to it from a held chunk, or it is fetched
whole. Chunks and deltas are both blobs, which a `Source` fetches; a chunk is rebuilt as soon as its deltas are in the
cache, and fetched whole if the result has another digest. An interrupted pull resumes from the blobs in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import structlog

from rlboost.shared.process.waiting import Waits
from rlboost.shared.progress import TransferProgress
from rlboost.shared.weights.assembly import Assembly, PullStats
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.delta_graph import VersionEdges
from rlboost.shared.weights.manifest import Manifest
from rlboost.shared.weights.peers.blob_index import BlobIndex
from rlboost.shared.weights.plan import ChunkPlan, plan
from rlboost.shared.weights.pulled import PulledVersion
from rlboost.shared.weights.source import Source, StoreSource

log = structlog.get_logger(__name__)

_RETAINED_VERSIONS = 2
"""The loaded version and the one that replaces it."""

CacheSeeder = Callable[[Manifest, Cache], int]
"""Copies chunks of a version that are on this machine already into the cache; returns how many. Blocks."""


@dataclass(slots=True)
class _Retained:
    manifest: Manifest
    deltas: set[str] = field(default_factory=set)
    """Deltas fetched for it, which peers may request."""
    indexes: list[BlobIndex] = field(default_factory=list)


class Puller:
    """Pulls versions into a cache.

    The results of the last two pulls stay readable, with their base versions; chunks of older ones are removed.
    """

    def __init__(
        self,
        client: StoreClient,
        cache: Cache,
        waits: Waits,
        *,
        source: Source | None = None,
        seeder: CacheSeeder | None = None,
        concurrency: int = 8,
        limit_s: float = 600.0,
    ) -> None:
        """Use an open client and a cache.

        Args:
            client: the weight store's client.
            cache: closed by the puller.
            waits: registry in which a running pull is listed.
            source: provides chunks and deltas; by default the weight store.
            seeder: provides chunks of a job's first version from this machine.
            concurrency: concurrent transfers of the default source.
            limit_s: maximum duration of one pull, including outages of the store.

        """
        self._client = client
        self._store = f"the weight store at {client.url}"
        self._cache = cache
        self._waits = waits
        self._source = source or StoreSource(client, cache, concurrency=concurrency)
        self._seeder = seeder
        self._seeded: dict[str, int] = {}
        """Job -> the version that was seeded; -1 for none."""
        self._limit_s = limit_s
        self._pulls: list[list[_Retained]] = []
        """The last results, the newest last: each a version, followed by its base version if it is an adapter."""
        self.last = PullStats()
        """Statistics of the running pull, or of the last one."""
        self._progress = TransferProgress()
        """The transfer of the pull that `last` counts."""
        self._one_at_a_time = asyncio.Lock()

    def close(self) -> None:
        """Close the cache."""
        self._cache.close()

    def verify_cache_again(self) -> None:
        """Verify the digest of each cached blob again in the next pull that needs it."""
        self._cache.verified.clear()

    async def pull(self, job_id: str, version: int) -> PulledVersion:
        """Pull a committed version into the cache; for an adapter, its base version too.

        Raises:
            NotFound: the store does not have it (any more).
            BadSignature: the version's manifest is not signed with this system's key.
            Corrupt: the store sent a blob twice with another digest.
            WaitTimedOut: the pull took longer than the limit.
            Fatal: the cache's disk is full.

        """
        because = f"pull version {version} of job {job_id}"
        wait = self._waits.on(self._store, because=because, limit_s=self._limit_s, progress=self._progress_text)
        async with wait, self._one_at_a_time:
            pulled = await self._pull(job_id, version)
        found: PulledVersion | None = None
        for retained in reversed(pulled):
            found = PulledVersion(retained.manifest, self._cache.blobs, base=found)
        assert found is not None
        return found

    def _progress_text(self) -> str:
        self._progress.done_bytes = self.last.bytes_dense + self.last.bytes_delta
        return self._progress.text()

    async def _pull(self, job_id: str, version: int) -> list[_Retained]:
        """Return the version, followed by its base version if it is an adapter."""
        self.last, self._progress = PullStats(), TransferProgress()
        await self._seed_cache(job_id)
        pulled = [await self._pull_one(job_id, version)]
        while (base := pulled[-1].manifest.base_version) is not None:
            pulled.append(self._retained_whole(job_id, base) or await self._pull_one(job_id, base))
        log.info("weights_pulled", job=job_id, version=version, **asdict(self.last))
        await self._retain(pulled)
        return pulled

    def _retained_whole(self, job_id: str, version: int) -> _Retained | None:
        """Return a retained version, None if it is not retained or not all of its chunks are verified."""
        for retained in self._retained():
            manifest = retained.manifest
            if (manifest.job_id, manifest.version) == (job_id, version):
                return retained if all(c.digest in self._cache.verified for c in manifest.chunks()) else None
        return None

    def _retained(self) -> list[_Retained]:
        """Return the versions that are retained, each once: several adapters may have one base."""
        return list({retained.manifest.digest: retained for pull in self._pulls for retained in pull}.values())

    async def _seed_cache(self, job_id: str) -> None:
        """Seed the cache with the job's oldest version, unless the job was pulled here before."""
        if self._seeder is None or job_id in self._seeded:
            return
        self._seeded[job_id] = -1
        if any(job == job_id for job, _ in self._cache.last_pulled()):
            return
        model = await retry_unavailable(lambda: self._client.model(job_id))
        if model is None or not model.versions:
            return
        oldest = model.versions[0].version
        manifest = await retry_unavailable(lambda: self._client.manifest(job_id, oldest))
        if await asyncio.to_thread(self._seeder, manifest, self._cache):
            self._seeded[job_id] = oldest

    async def _pull_one(self, job_id: str, version: int) -> _Retained:
        manifest = await retry_unavailable(lambda: self._client.manifest(job_id, version))
        retained = _Retained(manifest)
        chunk_plans = await self._plan(retained)
        self._progress.total_bytes += sum(chunk_plan.n_bytes for chunk_plan in chunk_plans)
        self._source.offer([index for known in [*self._retained(), retained] for index in known.indexes])
        await Assembly(self._source, self._cache, self.last).run(chunk_plans)
        retained.deltas = {edge.delta for chunk_plan in chunk_plans for edge in chunk_plan.path}
        return retained

    async def _plan(self, retained: _Retained) -> Sequence[ChunkPlan]:
        manifest = retained.manifest
        needed = list(manifest.chunks())
        cached = await asyncio.to_thread(self._cache.digests)
        retained.indexes.append(BlobIndex([chunk.digest for chunk in needed]))
        documents: tuple[VersionEdges, ...] = ()
        lacks_some = any(chunk.digest not in cached for chunk in needed)
        if cached and lacks_some and not await self._source.has_chunks_at_hand():
            job_id, version, have = manifest.job_id, manifest.version, self._newest_held(manifest)
            documents = await retry_unavailable(lambda: self._client.route(job_id, version, have))
            retained.indexes += [
                BlobIndex([edge.delta for edge in hop.edges]) for document in documents for hop in document.all_hops()
            ]
        edges = [edge for document in documents for edge in document.edges()]
        return await asyncio.to_thread(plan, needed, edges, cached)

    def _newest_held(self, manifest: Manifest) -> int:
        """Return the newest version below this one that is in the cache, as far as known."""
        known = [
            (retained.manifest.job_id, retained.manifest.version) for retained in self._retained()
        ] or self._cache.last_pulled()
        have = [version for job_id, version in known if job_id == manifest.job_id and version < manifest.version]
        seeded = self._seeded.get(manifest.job_id, -1)
        # Unknown: the previous version is a free guess.
        return max(have, default=seeded if seeded >= 0 else manifest.version - 1)

    async def _retain(self, pulled: list[_Retained]) -> None:
        """Retain this version and the previous one, with their bases; prune the rest of the cache."""
        others = [pull for pull in self._pulls if pull[0].manifest.digest != pulled[0].manifest.digest]
        self._pulls = [*others, pulled][-_RETAINED_VERSIONS:]
        keep = {chunk.digest for retained in self._retained() for chunk in retained.manifest.chunks()}
        deltas = {delta for retained in self._retained() for delta in retained.deltas}
        names = [(retained.manifest.job_id, retained.manifest.version) for retained in self._retained()]
        await asyncio.to_thread(self._cache.prune, keep | deltas, names)
