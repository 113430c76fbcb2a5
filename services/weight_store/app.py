"""The weight store: stages parts, commits versions, and serves them.

Its loops are those of its parts, each until the stop: `Announcements.announce` consumes commits in order and produces
`WeightsCommitted`; `DeltaComposer.compose` composes longer deltas; `Collector.collect` removes garbage. A commit is
valid before it is announced; every head is announced again at start, in case a crash came between.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog
from pydantic import ValidationError

from rlboost.services.weight_store.chunks import DamagedChunks, DerivedChunks
from rlboost.services.weight_store.deltas import Deltas
from rlboost.services.weight_store.domain import versions
from rlboost.services.weight_store.domain.versions import JobVersions, Shortfall, Version
from rlboost.services.weight_store.garbage import Collector, EndedJobs
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import ChunkLocation, Documents, StagedPart
from rlboost.shared.errors import BusUnavailable, Conflict, NotFound, Undecodable, UnsuitableWeights
from rlboost.shared.http.guard import require_few_values
from rlboost.shared.messages import WeightsCommitted
from rlboost.shared.process.waiting import Waits, retry_while
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.names import WEIGHTS_COMMITTED, job_refused, trainer_epoch
from rlboost.shared.weights.delta_graph import Edge
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, digest_of
from rlboost.shared.weights.rest_models import CommitRequest

log = structlog.get_logger(__name__)

# --- Announces committed versions on the bus, in order ----------------------------------------------------------------


_LIMIT_S = 3600.0
_RETRY_S = 0.5
_MAX_ANNOUNCED = 1000


class Announcements:
    """Committed versions that are not announced yet."""

    def __init__(self, bus: Bus, waits: Waits) -> None:
        self._bus = bus
        self._waits = waits
        self._queue: asyncio.Queue[WeightsCommitted | None] = asyncio.Queue()

    def add(self, job_id: str, version: Version) -> None:
        """Queue a version of a job."""
        self._queue.put_nowait(
            WeightsCommitted(
                job_id=job_id,
                version=version.version,
                manifest_digest=version.digest,
                n_bytes=version.n_bytes,
                at=version.committed_at,
                base=version.identity,
            )
        )

    async def announce(self, stop: asyncio.Event) -> None:
        """Announce every version, until the stop."""

        async def end() -> None:
            await stop.wait()
            self._queue.put_nowait(None)

        ending = asyncio.create_task(end(), name="announce-end")
        try:
            while (message := await self._queue.get()) is not None:
                await self._announce(message, stop)
        finally:
            ending.cancel()

    async def _announce(self, message: WeightsCommitted, stop: asyncio.Event) -> None:
        why = f"announce version {message.version} of job {message.job_id}"
        async with self._waits.on("Redis", because=why, limit_s=_LIMIT_S):
            with suppress(BusUnavailable):  # at the stop: the next start announces the newest version again
                await retry_while(
                    lambda error: isinstance(error, BusUnavailable) and not stop.is_set(),
                    lambda: self._bus.append(WEIGHTS_COMMITTED, message, _MAX_ANNOUNCED),
                    first_s=_RETRY_S,
                    longest_s=_RETRY_S,
                    jitter_s=0.0,
                )


# --- Assembles a manifest from the parts that the ranks of a trainer have staged --------------------------------------


async def assemble(documents: Documents, job_id: str, version: int, request: CommitRequest) -> Manifest:
    """Return the manifest assembled from the staged parts that a commit names.

    Raises:
        Conflict: a part is missing or has another digest, or the shards do not cover whole tensors.

    """
    parts = []
    for rank, digest in enumerate(request.parts):
        try:
            data = await documents.part(job_id, version, rank)
        except NotFound as error:
            raise Conflict(
                f"version {version} of job {job_id}: rank {rank} of {len(request.parts)} has not published"
            ) from error
        if digest_of(data) != digest:
            raise Conflict(
                f"version {version} of job {job_id}: the part of rank {rank} does not have the digest in the commit"
            )
        parts.append(await asyncio.to_thread(Part.decode, data))
    try:
        return Manifest(
            job_id=job_id,
            version=version,
            config_json=request.config_json,
            parts=tuple(parts),
            base_version=request.base_version,
            adapter_json=request.adapter_json,
            parity_json=request.parity_json,
        )
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise Conflict(f"version {version} of job {job_id} is incomplete: {reason}") from error


# --- The versions of each job -----------------------------------------------------------------------------------------


class VersionTable:
    """The versions of all jobs. A job whose document cannot be parsed is quarantined: nothing is served or changed."""

    def __init__(self, documents: Documents) -> None:
        """Read nothing before `load`."""
        self._documents = documents
        self._versions: dict[str, JobVersions] = {}
        self._unreadable: dict[str, str] = {}
        """Job -> why its document cannot be parsed."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load(self) -> None:
        """Read the versions of every job."""
        for job_id in await self._documents.jobs():
            try:
                self._versions[job_id] = await self._documents.versions_of(job_id)
            except Undecodable as error:
                self._unreadable[job_id] = str(error)
                log.error("model_quarantined", job=job_id, reason=str(error))  # noqa: TRY400 - the cause is in the message; a traceback adds nothing

    def lock(self, job_id: str) -> asyncio.Lock:
        """Return the lock that is held while a job's documents change."""
        return self._locks[job_id]

    def all(self) -> Sequence[JobVersions]:
        """Return the versions of every job, by job id."""
        return [job for _, job in sorted(self._versions.items())]

    def get(self, job_id: str) -> JobVersions:
        """Return a job's versions, none before its first commit; raises `Conflict` if it is quarantined."""
        if reason := self._unreadable.get(job_id):
            raise Conflict(
                f"the weights of job {job_id} are quarantined: {reason}. Restore the document from a backup or remove "
                f"the folder models/{job_id}, then restart the weight store"
            )
        return self._versions.get(job_id, JobVersions(job_id))

    def committed(self, job_id: str) -> JobVersions:
        """Return the versions of a job that has any.

        Raises:
            NotFound: nothing was committed for this job.
            Conflict: it is quarantined.

        """
        job = self.get(job_id)
        if not job.versions:
            raise NotFound(f"job {job_id} has no committed version")
        return job

    def check_all_readable(self) -> None:
        """Raise `Undecodable` if a job is quarantined."""
        if self._unreadable:
            raise Undecodable(f"the documents of {', '.join(sorted(self._unreadable))} cannot be parsed")

    async def save(self, job: JobVersions) -> None:
        """Replace a job's versions; the caller holds the job's lock."""
        await self._documents.save_versions(job)
        self._versions[job.job_id] = job


# --- The weight store: stages, commits and serves versions -----------------------------------------------------------


MAX_EXTERNAL_RANKS = 16
"""Of the parts of one version, which no limit of the store's size counts."""


class WeightStore:
    """The weights of all jobs."""

    def __init__(  # noqa: PLR0913 - its ports and limits
        self,
        chunks: DerivedChunks,
        documents: Documents,
        deltas: Deltas,
        bus: Bus,
        waits: Waits,
        metrics: Metrics,
        *,
        sign: Callable[[bytes], str],
        keep_versions: int,
        clock: Callable[[], float],
    ) -> None:
        """Read nothing before `load`.

        Args:
            chunks: the chunks.
            documents: manifests, parts and the versions of each job.
            deltas: the deltas between chunks.
            bus: where commits are announced, and who holds a job.
            waits: registry of waits.
            metrics: the service's metrics.
            sign: returns the signature of a manifest's statement.
            keep_versions: how many versions of a job are retained.
            clock: returns Unix seconds, rounded to microseconds.

        """
        self._bus = bus
        self._sign = sign
        self._chunks = chunks
        self._documents = documents
        self._deltas = deltas
        self._metrics = metrics
        self._keep = keep_versions
        self._clock = clock
        self.damaged = DamagedChunks(chunks, documents)
        self._versions = VersionTable(documents)
        self._ended_jobs = EndedJobs(bus)
        self.announcements = Announcements(bus, waits)
        self.collector = Collector(self._versions, chunks, documents, deltas, self._ended_jobs, metrics, clock=clock)

    async def load(self) -> None:
        """Read all versions, announce every head, and queue every version for the composition of deltas."""
        held = await self._chunks.last_used()
        await self._versions.load()
        for job in self._versions.all():
            if job.versions:
                self.announcements.add(job.job_id, job.versions[-1])
            await self._deltas.restore(job, held)
            for version in job.versions:
                self._deltas.queue_composition(job.job_id, version.version, job.pinned_initial_version)

    def all_versions(self) -> list[JobVersions]:
        """Return the versions of every job that has any, by job id."""
        return [job for job in self._versions.all() if job.versions]

    def versions_of(self, job_id: str) -> JobVersions:
        """Return a job's versions; raises what `VersionTable.committed` raises."""
        return self._versions.committed(job_id)

    async def manifest(self, job_id: str, version: int) -> tuple[bytes, str]:
        """Return the manifest of a visible version and its digest; raises `NotFound`."""
        found = self.versions_of(job_id).find(version)
        if found is None:
            raise NotFound(f"version {version} of job {job_id} is not retained")
        return await self._documents.manifest(job_id, version), found.digest

    async def route(self, job_id: str, version: int, have: int) -> bytes:
        """Return the edges from version `have` to a committed version, even a retired one, as `Route`.

        Raises:
            NotFound: the version is not committed.

        """
        job = self.versions_of(job_id)
        if version > job.head:
            raise NotFound(f"version {version} of job {job_id} is not committed")
        return (await self._deltas.route(job_id, version, have, job.pinned_initial_version)).encode()

    async def put_chunk(self, digest: str, blocks: Sequence[bytes | memoryview]) -> None:
        """Store a chunk given as blocks.

        Raises:
            BadChunk: the bytes do not have the digest.
            StoreFull: the disk is full.

        """
        await self._chunks.put(digest, blocks, self._clock())
        self.damaged.on_uploaded(digest)

    async def missing(self, chunks: Sequence[ChunkRef]) -> list[str]:
        """Return the digests that the store lacks; the others are retained for at least `UPLOAD_GRACE_S`."""
        return await self._chunks.missing(chunks, self._clock())

    async def apply(self, edges: Sequence[Edge]) -> list[str]:
        """Derive chunks from deltas that the store has; return the digests of those that cannot be derived.

        Raises:
            StoreFull: the disk is full.

        """
        return await self._deltas.apply(edges)

    async def source(self, digest: str) -> ChunkLocation:
        """Return the location of a chunk's bytes.

        Raises:
            NotFound: no retained version needs it.
            StoreUnavailable: it is damaged or lost, and must be uploaded again.

        """
        try:
            return await self._chunks.source(digest)
        except NotFound:
            await self.damaged.check_needed(digest, self.all_versions())
            raise

    async def put_part(self, job_id: str, version: int, rank: int, data: bytes, epoch: int | None = None) -> None:
        """Stage one rank's part for the commit, for an external trainer under its epoch.

        Raises:
            Conflict: the external trainer no longer holds the job, or the version is neither retained nor the next.
            Undecodable: it is not a part of that rank, or of too high a rank or too large for an external trainer.
            StoreFull: the disk is full.

        """
        if epoch is not None:
            if rank >= MAX_EXTERNAL_RANKS:
                raise Undecodable(
                    f"rank {rank}: an external trainer publishes parts of ranks below {MAX_EXTERNAL_RANKS}"
                )
            try:
                require_few_values(data)
            except ValueError as error:
                raise Undecodable(f"the part of rank {rank}: {error}") from error
        part = await asyncio.to_thread(Part.decode, data)
        if part.rank != rank:
            raise Undecodable(f"this is the part of rank {part.rank}, not of rank {rank}")
        async with self._versions.lock(job_id):
            if epoch is not None:
                await self._check_epoch(job_id, epoch)
                job = self._versions.get(job_id)
                if version != job.head + 1 and job.find(version) is None:
                    raise Conflict(f"version {version} of job {job_id} is not the next one, nor retained")
            await self._documents.put_part(job_id, StagedPart(version, rank, self._clock()), data)

    async def commit(self, job_id: str, version: int, request: CommitRequest) -> Version:
        """Make a version the head. Idempotent: a repeated commit with the same content returns the version.

        Raises:
            Conflict: the head is not the expected one, the version exists with other content, a part or a chunk is
                missing, the shards do not cover whole tensors, or its trainer no longer holds the job.
            BusUnavailable: Redis, which knows who holds it, does not answer.
            StoreFull: the disk is full.
            Undecodable: a list of edges is invalid.
            UnsuitableWeights: its tensors are not those of the model before, which a worker could load.

        """
        result = await self._commit(job_id, version, request)
        if isinstance(result, Shortfall) and await self._supply(result):
            result = await self._commit(job_id, version, request)
        if isinstance(result, Shortfall):
            raise Conflict(f"version {version} of job {job_id} lacks {result.missing} chunks: publish it again")
        return result

    async def _supply(self, shortfall: Shortfall) -> bool:
        """Write and derive the chunks that a commit lacks; return False if some cannot be derived.

        Not under the job's lock: a write may collect garbage.
        """
        if not shortfall.edges and not shortfall.unrecorded:
            return False
        await self._chunks.write_each(shortfall.unrecorded)
        # A restarted store has forgotten derived chunks that were not written: derive them again from the edges.
        return not await self._deltas.apply(shortfall.edges)

    async def _commit(self, job_id: str, version: int, request: CommitRequest) -> Version | Shortfall:
        async with self._versions.lock(job_id):
            job = self._versions.get(job_id)
            if found := job.find(version):
                await self._check_same(job_id, found, request)
                return found
            await self._check_epoch(job_id, request.epoch)
            versions.check_commit(job, version, request.expect, request.base_version)
            manifest = await assemble(self._documents, job_id, version, request)
            await self._check_tensors(job, manifest)
            manifest = manifest.model_copy(update={"signature": self._sign(manifest.statement())})
            hop = await self._deltas.uploaded_hop(version, manifest)
            now = self._clock()
            refs = list(manifest.chunks())
            edges = frozenset(hop.edges if hop else ())
            missing = set(await self._chunks.missing(refs, now))
            unrecorded = self._chunks.without_recorded_edge(refs, edges)
            if missing or unrecorded:
                chunks = f"{len(missing) + len(unrecorded)} of {len(refs)}"
                return Shortfall(chunks, [edge for edge in edges if edge.new in missing], unrecorded)
            data = await asyncio.to_thread(manifest.encode)
            await self._chunks.sync()
            delta_bytes = await self._deltas.write_hop(job_id, version, hop)
            await self._documents.put_manifest(job_id, version, data)
            base = None if manifest.base_version is None else job.find(manifest.base_version)
            identity = base.identity if base else await asyncio.to_thread(lambda: manifest.identity)
            new = Version(version, digest_of(data), manifest.n_bytes, now, manifest.base_version, delta_bytes, identity)
            await self._versions.save(versions.commit(job, new, keep=self._keep))
        self._metrics.commits.inc()
        self.announcements.add(job_id, new)
        self._deltas.queue_composition(job_id, version, self._versions.get(job_id).pinned_initial_version)
        log.info("version_committed", job=job_id, version=version, n_bytes=new.n_bytes, digest=new.digest)
        return new

    async def pin(self, job_id: str, version: int) -> None:
        """Retain a version until it is unpinned; raises `NotFound`."""
        async with self._versions.lock(job_id):
            await self._versions.save(versions.pin(self.versions_of(job_id), version))

    async def unpin(self, job_id: str, version: int) -> None:
        """Release a pin, if there is one; the version is retired once it is not among the newest."""
        async with self._versions.lock(job_id):
            await self._versions.save(versions.unpin(self.versions_of(job_id), version, keep=self._keep))

    async def delete(self, job_id: str) -> None:
        """Retire all versions of an ended job, pinned ones included.

        Raises:
            NotFound: it has no versions.
            Conflict: it has not ended.
            BusUnavailable: Redis, which knows whether it has, does not answer.

        """
        async with self._versions.lock(job_id):
            job = self.versions_of(job_id)
            await self._ended_jobs.check(job_id)
            await self._deltas.forget(job_id, await self._documents.edge_versions(job_id))
            await self._versions.save(versions.retire_all(job))
        log.info("model_deleted", job=job_id, versions=len(job.versions))

    async def _check_epoch(self, job_id: str, epoch: int | None) -> None:
        """Check that the trainer that commits still holds the job; None: it does not say that it does."""
        if epoch is not None and (now := await self._bus.counter(trainer_epoch(job_id))) != epoch:
            why = f"another trainer has taken it (epoch {now})" if now else "it has ended"
            raise Conflict(f"a trainer of epoch {epoch} publishes weights of job {job_id}, but {why}")

    async def _check_tensors(self, job: JobVersions, manifest: Manifest) -> None:
        """Check a whole model against the newest one, unless a worker could not load that one."""
        newest = next((known.version for known in reversed(job.versions) if known.base is None), None)
        if newest is None or manifest.is_adapter:
            return
        data = await self._documents.manifest(job.job_id, newest)

        def check() -> None:
            versions.check_tensors(manifest.version, manifest, Manifest.decode(data))

        try:
            await asyncio.to_thread(check)
        except UnsuitableWeights:
            if await self._bus.hash_get(job_refused(job.job_id), str(newest)) is None:
                raise

    async def _check_same(self, job_id: str, found: Version, request: CommitRequest) -> None:
        data = await self._documents.manifest(job_id, found.version)
        manifest = await asyncio.to_thread(Manifest.decode, data)
        parts = tuple(part.digest for part in manifest.parts)
        # Not the parity reference: two trainers may differ in its last digits for the same weights.
        committed = (parts, manifest.config_json, manifest.base_version, manifest.adapter_json)
        if committed != (request.parts, request.config_json, request.base_version, request.adapter_json):
            raise Conflict(f"version {found.version} of job {job_id} is committed already with other content")
