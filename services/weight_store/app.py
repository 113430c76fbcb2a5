"""The weight store: stages parts, commits versions, announces them, and collects garbage.

Three loops, each until the stop:

- `announcements.announce` consumes commits in order and produces `WeightsCommitted`. It waits for the next commit and
  for Redis, and ends at the stop. A commit is valid before it is announced; every head is announced again at start, in
  case a crash came between.
- `DeltaComposer.compose` writes chunks that deltas lead to, and composes longer deltas: see `delta_composer`.
- `collect` consumes nothing and, once a minute or at the limit of the store's size, retires the versions of ended jobs
  and removes the chunks that no version and no upload in progress needs. It waits for Redis and for the chunk and
  document stores, and ends at the stop.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from rlboost.services.weight_store.announcements import Announcements
from rlboost.services.weight_store.damage import DamagedChunks
from rlboost.services.weight_store.deltas import Deltas
from rlboost.services.weight_store.derived_chunks import DerivedChunks
from rlboost.services.weight_store.domain import versions
from rlboost.services.weight_store.domain.garbage import garbage
from rlboost.services.weight_store.domain.versions import Model, Shortfall, Version
from rlboost.services.weight_store.ended_jobs import EndedJobs
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.parts import assemble
from rlboost.services.weight_store.ports import ChunkLocation, Documents, StagedPart, StoreFull
from rlboost.shared.errors import BusUnavailable, Conflict, NotFound, StoreUnavailable, Undecodable
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.streams.bus import Bus
from rlboost.shared.waiting import Waits
from rlboost.shared.weights.delta_graph import Edge
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, digest_of
from rlboost.shared.weights.rest_models import CommitRequest

log = structlog.get_logger(__name__)

UPLOAD_GRACE_S = 3600.0
"""Maximum time of an upload from its first chunk to the commit."""
_COLLECT_INTERVAL_S = 60.0
ENDED_GRACE_S = 600.0
"""How long the versions of an ended job remain, so that each can still be exported."""


class WeightStore:
    """All models of one store."""

    def __init__(
        self,
        chunks: DerivedChunks,
        documents: Documents,
        deltas: Deltas,
        bus: Bus,
        waits: Waits,
        metrics: Metrics,
        *,
        keep_versions: int,
        clock: Callable[[], float],
    ) -> None:
        """Read nothing before `load`; `clock` returns Unix seconds."""
        self._chunks = chunks
        self._documents = documents
        self._deltas = deltas
        self._metrics = metrics
        self._keep = keep_versions
        self._clock = clock
        self.damaged = DamagedChunks(chunks, documents)
        self._models: dict[str, Model] = {}
        self._unreadable: dict[str, str] = {}
        """Why a job's document cannot be parsed, by job. Nothing of these jobs is served or changed."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By job: held while its documents change."""
        self._tidying = asyncio.Lock()
        self.announcements = Announcements(bus, waits)
        self._ended_jobs = EndedJobs(bus)

    async def load(self) -> None:
        """Read every model, announce every head, and queue every version for the composition of deltas."""
        held = await self._chunks.last_used()
        for job_id in await self._documents.jobs():
            try:
                model = await self._documents.model(job_id)
            except Undecodable as error:
                self._unreadable[job_id] = str(error)
                continue
            self._models[job_id] = model
            if model.versions:
                self.announcements.add(job_id, model.versions[-1])
            await self._deltas.restore(model, held)
            for version in model.versions:
                self._deltas.queue_composition(job_id, version.version, model.base)
        for job_id, reason in self._unreadable.items():
            log.error("model_quarantined", job=job_id, reason=reason)

    def models(self) -> list[Model]:
        """Return every model with a version, by job id."""
        return [model for _, model in sorted(self._models.items()) if model.versions]

    def model(self, job_id: str) -> Model:
        """Return one model.

        Raises:
            NotFound: nothing was committed for this job.
            Conflict: its document cannot be parsed.

        """
        self._check_readable(job_id)
        model = self._models.get(job_id)
        if model is None or not model.versions:
            raise NotFound(f"job {job_id} has no committed version")
        return model

    def _check_readable(self, job_id: str) -> None:
        if reason := self._unreadable.get(job_id):
            raise Conflict(
                f"the weights of job {job_id} are quarantined: {reason}. Restore the document from a backup or remove "
                f"the folder models/{job_id}, then restart the weight store"
            )

    async def manifest(self, job_id: str, version: int) -> tuple[bytes, str]:
        """Return the manifest of a visible version and its digest; raises `NotFound`."""
        found = self.model(job_id).find(version)
        if found is None:
            raise NotFound(f"version {version} of job {job_id} is not retained")
        return await self._documents.manifest(job_id, version), found.digest

    async def route(self, job_id: str, version: int, have: int) -> bytes:
        """Return the edges from version `have` to a committed version, even a retired one, as `Route`.

        Raises:
            NotFound: the version is not committed.

        """
        model = self.model(job_id)
        if version > model.head:
            raise NotFound(f"version {version} of job {job_id} is not committed")
        return (await self._deltas.route(job_id, version, have, model.base)).encode()

    async def put_chunk(self, digest: str, blocks: Sequence[bytes | memoryview]) -> None:
        """Store a chunk given as blocks.

        Raises:
            BadChunk: the bytes do not have the digest.
            StoreFull: the disk is full.

        """
        await self._chunks.put(digest, blocks, self._now())
        self.damaged.on_uploaded(digest)

    async def missing(self, chunks: Sequence[ChunkRef]) -> list[str]:
        """Return the digests that the store lacks; the others are retained for at least `UPLOAD_GRACE_S`."""
        return await self._chunks.missing(chunks, self._now())

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
            await self.damaged.check_needed(digest, self.models())
            raise

    async def put_part(self, job_id: str, version: int, rank: int, data: bytes) -> None:
        """Stage one rank's part for the commit.

        Raises:
            Undecodable: it is not a part of that rank.
            StoreFull: the disk is full.

        """
        part = await asyncio.to_thread(Part.decode, data)
        if part.rank != rank:
            raise Undecodable(f"this is the part of rank {part.rank}, not of rank {rank}")
        async with self._locks[job_id]:
            await self._documents.put_part(job_id, StagedPart(version, rank, self._now()), data)

    async def commit(self, job_id: str, version: int, request: CommitRequest) -> Version:
        """Make a version the head. Idempotent: a repeated commit with the same content returns the version.

        Raises:
            Conflict: the head is not the expected one, the version exists with other content, a part or a chunk is
                missing, or the shards do not cover whole tensors.
            StoreFull: the disk is full.
            Undecodable: a list of edges is invalid.

        """
        result = await self._commit(job_id, version, request)
        if isinstance(result, Shortfall) and await self._supply(result):
            result = await self._commit(job_id, version, request)
        if isinstance(result, Shortfall):
            raise Conflict(f"version {version} of job {job_id} lacks {result.chunks} chunks: publish it again")
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
        async with self._locks[job_id]:
            self._check_readable(job_id)
            model = self._models.get(job_id, Model(job_id))
            if found := model.find(version):
                await self._check_same(job_id, found, request)
                return found
            versions.check_commit(model, version, request.expect, request.base_version)
            manifest = await assemble(self._documents, job_id, version, request)
            hop = await self._deltas.uploaded_hop(version, manifest)
            now = self._now()
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
            new = Version(version, digest_of(data), manifest.n_bytes, now, manifest.base_version, delta_bytes)
            await self._save(versions.commit(model, new, keep=self._keep))
        self._metrics.commits.inc()
        self.announcements.add(job_id, new)
        self._deltas.queue_composition(job_id, version, self._models[job_id].base)
        log.info("version_committed", job=job_id, version=version, n_bytes=new.n_bytes, digest=new.digest)
        return new

    async def pin(self, job_id: str, version: int) -> None:
        """Retain a version until it is unpinned; raises `NotFound`."""
        async with self._locks[job_id]:
            await self._save(versions.pin(self.model(job_id), version))

    async def unpin(self, job_id: str, version: int) -> None:
        """Release a pin, if there is one; the version is retired once it is not among the newest."""
        async with self._locks[job_id]:
            await self._save(versions.unpin(self.model(job_id), version, keep=self._keep))

    async def delete(self, job_id: str) -> None:
        """Retire all versions of an ended job, pinned ones included.

        Raises:
            NotFound: it has no versions.
            Conflict: it has not ended.
            BusUnavailable: Redis, which knows whether it has, does not answer.

        """
        async with self._locks[job_id]:
            model = self.model(job_id)
            await self._ended_jobs.check(job_id)
            await self._deltas.forget(job_id, await self._documents.edge_versions(job_id))
            await self._save(versions.retire_all(model))
        log.info("model_deleted", job=job_id, versions=len(model.versions))

    async def collect(self, stop: asyncio.Event) -> None:
        """Collect garbage once a minute."""
        while not await until_stop(stop, _COLLECT_INTERVAL_S):
            await self.tidy(ended_before=self._now() - ENDED_GRACE_S)

    async def tidy(self, ended_before: float = math.inf) -> None:
        """Retire the versions of ended jobs and collect garbage; what is unavailable now is deferred."""
        async with self._tidying:
            for action in (partial(self.retire_ended, ended_before), self.collect_once):
                try:
                    await action()
                except (BusUnavailable, StoreFull, StoreUnavailable, Undecodable) as error:
                    log.warning("collection_deferred", error=str(error))

    async def retire_ended(self, before: float = math.inf) -> None:
        """Retire all but the last version of jobs that ended `before`; pinned ones and bases stay. See `EndedJobs`."""
        for job_id in sorted(await self._ended_jobs.ids(before) & self._models.keys()):
            async with self._locks[job_id]:
                model = self._models[job_id]
                if (after := versions.retire(model, keep=1)) != model:
                    await self._save(after)

    async def collect_once(self) -> None:
        """Remove retired versions, abandoned parts, and unreferenced chunks.

        Raises:
            Undecodable: the chunks that a job refers to are unknown, so nothing was removed.

        """
        if self._unreadable:
            raise Undecodable(f"the documents of {', '.join(sorted(self._unreadable))} cannot be parsed")
        now = self._now()
        # Read before the references: a chunk that is referenced for the first time later has also been used later.
        last_used = await self._chunks.last_used()
        referenced: set[str] = set()
        retired: dict[str, float] = {}
        chunks_of: dict[tuple[str, int], set[str]] = {}
        seen: list[tuple[Model, list[int]]] = []
        for job_id in await self._documents.jobs():
            async with self._locks[job_id]:
                model = self._models.get(job_id, Model(job_id))
                referenced |= await self._staged_chunks(model, now)
                for version in model.versions:
                    referenced |= await self._chunks_of(job_id, version)
                for version in model.retired:
                    chunks_of[job_id, version.version] = chunks = await self._chunks_of(job_id, version)
                    retired |= dict.fromkeys(chunks, version.committed_at)
                deltas = await self._deltas.survey(model)
                referenced |= deltas.referenced
                retired |= deltas.dropped
                seen.append((model, deltas.outdated))
        abandoned = garbage(self._chunks.derived_last_used(), referenced, retired, now=now, grace_s=UPLOAD_GRACE_S)
        self._chunks.drop(abandoned)
        derived_from = self._chunks.inputs()
        victims = garbage(last_used, referenced | derived_from, retired, now=now, grace_s=UPLOAD_GRACE_S)
        if victims:
            await self._chunks.sync()  # chunks written in the meantime, before the bases that led to them are removed
        await self._chunks.remove(victims)
        self._metrics.chunks_removed.inc(len(victims))
        for model, outdated in seen:
            await self._deltas.forget(model.job_id, outdated)
            # A version whose chunks are bases stays retired, so that its chunks are garbage once they are not.
            removable = [
                version
                for version in model.retired
                if chunks_of[model.job_id, version.version].isdisjoint(derived_from)
            ]
            await self._remove_retired(model.job_id, tuple(removable))

    async def _staged_chunks(self, model: Model, now: float) -> set[str]:
        chunks: set[str] = set()
        for part in await self._documents.parts(model.job_id):
            if part.version <= model.head or part.staged_at < now - UPLOAD_GRACE_S:
                await self._documents.remove_part(model.job_id, part)
            else:
                data = await self._documents.part(model.job_id, part.version, part.rank)
                content = await asyncio.to_thread(Part.decode, data)
                chunks |= {blob.digest for blob in (*content.chunks, *content.edges)}
        return chunks

    async def _chunks_of(self, job_id: str, version: Version) -> set[str]:
        try:
            data = await self._documents.manifest(job_id, version.version)
        except NotFound:
            # Retired, and its manifest removed just before the process was killed.
            return set()
        return {chunk.digest for chunk in (await asyncio.to_thread(Manifest.decode, data)).chunks()}

    async def _remove_retired(self, job_id: str, retired: tuple[Version, ...]) -> None:
        if not retired:
            return
        for version in retired:
            await self._documents.remove_manifest(job_id, version.version)
            log.info("version_removed", job=job_id, version=version.version)
        async with self._locks[job_id]:
            await self._save(versions.forget_retired(self._models[job_id], retired))

    async def _check_same(self, job_id: str, found: Version, request: CommitRequest) -> None:
        data = await self._documents.manifest(job_id, found.version)
        manifest = await asyncio.to_thread(Manifest.decode, data)
        parts = tuple(part.digest for part in manifest.parts)
        # Not the parity reference: two trainers may differ in its last digits for the same weights.
        committed = (parts, manifest.config_json, manifest.base_version, manifest.adapter_json)
        if committed != (request.parts, request.config_json, request.base_version, request.adapter_json):
            raise Conflict(f"version {found.version} of job {job_id} is committed already with other content")

    async def _save(self, model: Model) -> None:
        await self._documents.save_model(model)
        self._models[model.job_id] = model

    def _now(self) -> float:
        # The resolution of the chunk store: a time read back from it compares equal.
        return round(self._clock(), 6)
