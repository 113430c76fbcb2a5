"""Pulls a version into the cache, whole and verified, and fetches only what is missing.

For each chunk a plan selects the cheapest option: it is held, deltas lead to it from a held chunk, or it is fetched
whole. Chunks and deltas are both blobs, which a `Source` fetches; a chunk is rebuilt as soon as its deltas are in the
cache, and fetched whole if the result has another digest. An interrupted pull resumes from the blobs in the cache.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

import structlog

from rlboost.shared.errors import ConfigError, Corrupt, NotFound, StoreUnavailable, Unprocessable, UnsuitableWeights
from rlboost.shared.process.waiting import Waits, for_each
from rlboost.shared.progress import TransferProgress
from rlboost.shared.weights.access import IssuedAccess
from rlboost.shared.weights.cache import AdaptedVersion, Cache, CachedVersion, PulledVersion, cached_version
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.delta import apply_delta
from rlboost.shared.weights.delta_graph import ChunkPlan, VersionEdges, plan
from rlboost.shared.weights.manifest import ChunkRef, Manifest
from rlboost.shared.weights.peers.selection import BlobIndex
from rlboost.shared.weights.rest_models import ChunkDirectory
from rlboost.shared.weights.transfer import Buffers, Download

log = structlog.get_logger(__name__)

# --- Sources of blobs for a puller: the weight store alone, or peers and the store (see `peers.source`) ---------------


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
        async def settle(blob: ChunkRef) -> None:
            await on_settled(blob, await self.fetch_one(blob, traffic))

        await for_each(blobs, settle, concurrency=self._concurrency, name="weights-fetch")

    async def fetch_one(
        self, blob: ChunkRef, traffic: Traffic, watch: Callable[[Download], None] = lambda _: None
    ) -> Exception | None:
        """Fetch one blob into the cache; return the error if it cannot be obtained.

        Waits for an unavailable store, and for a publisher to upload a chunk again that is damaged in the store.
        `watch` gets each download when it begins.
        """
        for _ in range(2):
            watch(download := Download(blob, self._buffers))
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
        return False

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
        """Do nothing: this source has no peers."""


# --- Takes chunks from the weight store's own files when this machine shares its file system --------------------------


_MAX_CONCURRENT = 4
"""Blobs taken from the store's files concurrently, and held chunks verified concurrently."""


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
        return await self._shared() is not None

    def offer(self, indexes: Sequence[BlobIndex]) -> None:
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


# --- The puller -------------------------------------------------------------------------------------------------------


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
        limit_s: float = 600.0,
    ) -> None:
        """Use an open client and a cache.

        Args:
            client: the weight store's client.
            cache: closed by the puller.
            waits: registry in which a running pull is listed.
            source: provides chunks and deltas; by default the weight store.
            seeder: provides chunks of a job's first version from this machine.
            limit_s: maximum duration of one pull, including outages of the store.

        """
        self._client = client
        self._store = f"the weight store at {client.url}"
        self._cache = cache
        self._waits = waits
        self._source = source or StoreSource(client, cache, concurrency=8)
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
        pulled = [await self._pull_one(job_id, version, ())]
        while (base := pulled[-1].manifest.base_version) is not None:
            pulled.append(self._retained_whole(job_id, base) or await self._pull_one(job_id, base, pulled))
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

    async def _pull_one(self, job_id: str, version: int, pulled: Sequence[_Retained]) -> _Retained:
        """Pull a version; `pulled` are the adapters on it, which peers may request meanwhile."""
        manifest = await retry_unavailable(lambda: self._client.manifest(job_id, version))
        retained = _Retained(manifest)
        chunk_plans = await self._plan(retained)
        self._progress.total_bytes += sum(chunk_plan.n_bytes for chunk_plan in chunk_plans)
        known = [*self._retained(), *pulled, retained]
        self._source.offer([index for one in known for index in one.indexes])
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
            apply_delta(data, self._cache.path(edge.delta).read_bytes())
        return self._cache.store(chunk_plan.chunk, data)

    def _fall_back(self, chunk_plan: ChunkPlan, error: Exception) -> None:
        """Queue a chunk to be fetched whole, at most once."""
        if self._n_missing.pop(chunk_plan.chunk.digest, None) is None:
            return
        self._stats.fallbacks += 1
        self._dense.append(chunk_plan.chunk)
        log.warning("delta_failed", chunk=chunk_plan.chunk.digest, error=str(error))


# --- What an engine gets of the weight store: versions as tensors, tokenizers, images ---------------------------------


_MAX_TOKENIZERS = 16
"""Of jobs that share the engine; each is some megabytes."""


class StoreWeights:
    """The weights, tokenizers and images of one weight store: a worker's `WeightSource`."""

    def __init__(
        self,
        puller: Puller,
        client: StoreClient,
        access: IssuedAccess,
        fetch_tokenizer: Callable[[str], Awaitable[str]],
    ) -> None:
        """Use a puller, its client, which has this access, and what fetches the tokenizer of a job."""
        self._puller = puller
        self._client = client
        self._access = access
        self._fetch_tokenizer = fetch_tokenizer
        self._tokenizers: dict[str, str] = {}

    async def pull(self, job_id: str, version: int) -> CachedVersion | AdaptedVersion:
        pulled = await self._puller.pull(job_id, version)
        try:
            return cached_version(pulled)
        except ConfigError as error:  # of what was published: the next version may be another
            raise UnsuitableWeights(str(error)) from error

    async def tokenizer_json(self, job_id: str) -> str:
        if job_id not in self._tokenizers:
            while len(self._tokenizers) >= _MAX_TOKENIZERS:
                del self._tokenizers[next(iter(self._tokenizers))]
            self._tokenizers[job_id] = await self._fetch_tokenizer(job_id)
        return self._tokenizers[job_id]

    async def image(self, digest: str, n_bytes: int) -> bytes:
        return await retry_unavailable(lambda: self._client.read(ChunkRef(digest, n_bytes)))

    def verify_cache_again(self) -> None:
        self._puller.verify_cache_again()

    def renew_access(self, credential: str) -> None:
        self._access.credential = credential
