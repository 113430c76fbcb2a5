"""Collects garbage: versions of ended jobs, and the chunks that no version and no upload in progress needs.

One loop, `collect`, consumes nothing and, once a minute or at the limit of the store's size, retires the versions of
ended jobs and removes what no job refers to. It waits for Redis and for the chunk and document stores, and ends at the
stop. The rules are in `domain.versions`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from rlboost.services.weight_store.chunks import DerivedChunks
from rlboost.services.weight_store.deltas import Deltas
from rlboost.services.weight_store.domain import versions
from rlboost.services.weight_store.domain.versions import JobVersions, garbage
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import Documents, StoreFull
from rlboost.shared.errors import BusUnavailable, Conflict, NotFound, StoreUnavailable, Undecodable
from rlboost.shared.messages import ENDED
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.names import JOBS, trainer_lease
from rlboost.shared.weights.manifest import Manifest, Part

if TYPE_CHECKING:
    from rlboost.services.weight_store.app import VersionTable

log = structlog.get_logger(__name__)

# --- Which jobs have ended, by the records that the manager stores and the leases that trainers hold ------------------


class EndedJobs:
    """The jobs that commit no more versions."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ids(self, before: float = math.inf) -> set[str]:
        """Return the jobs that ended before a time (Unix seconds), or when is not known; raises `BusUnavailable`."""
        records = {job_id: _fields(record) for job_id, record in (await self._bus.hash_all(JOBS)).items()}
        return {
            job_id
            for job_id, record in records.items()
            if record.get("state") in ENDED and not _is_later(record.get("finished_at"), before)
        }

    async def check(self, job_id: str) -> None:
        """Check that a job has ended, or is unknown and no trainer holds it.

        Raises:
            Conflict: it has not.
            BusUnavailable: Redis does not answer.

        """
        record = await self._bus.hash_get(JOBS, job_id)
        (trainer,) = await self._bus.lease_values([trainer_lease(job_id)])
        state = str(_fields(record).get("state", "")) if record is not None else ""
        if trainer is not None or (record is not None and state not in ENDED):
            raise Conflict(
                f"job {job_id} has not ended (state {state or 'unknown'}): cancel it with 'rlboost cancel {job_id}' "
                "and wait until it has ended"
            )


def _fields(record: str) -> dict[str, Any]:
    try:
        fields = json.loads(record)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_later(at: object, limit: float) -> bool:
    return isinstance(at, int | float) and at >= limit


# --- The collection of garbage ----------------------------------------------------------------------------------------


UPLOAD_GRACE_S = 3600.0
"""Maximum time of an upload from its first chunk to the commit."""
_COLLECT_INTERVAL_S = 60.0
ENDED_GRACE_S = 600.0
"""How long the versions of an ended job remain, so that each can still be exported."""


class _References(NamedTuple):
    """What one job refers to, by digest of chunks and deltas."""

    versions: JobVersions
    needed: set[str]
    """Digests needed by visible versions, staged parts or retained edges."""
    retired: dict[str, float]
    """Chunk or delta -> time; it is garbage unless it is needed or was used after that time."""
    chunks_of: dict[int, set[str]]
    """Retired version -> digests of its chunks."""
    outdated: list[int]
    """Versions whose edges are removed."""


class Collector:
    """Collects the garbage of one store."""

    def __init__(
        self,
        table: VersionTable,
        chunks: DerivedChunks,
        documents: Documents,
        deltas: Deltas,
        ended_jobs: EndedJobs,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
    ) -> None:
        """Remove from the store's ports; `clock` returns Unix seconds, rounded to microseconds."""
        self._versions = table
        self._chunks = chunks
        self._documents = documents
        self._deltas = deltas
        self._ended_jobs = ended_jobs
        self._metrics = metrics
        self._clock = clock
        self._tidying = asyncio.Lock()

    async def collect(self, stop: asyncio.Event) -> None:
        """Collect garbage once a minute."""
        while not await until_stop(stop, _COLLECT_INTERVAL_S):
            await self.tidy(ended_before=self._clock() - ENDED_GRACE_S)

    async def tidy(self, ended_before: float = math.inf) -> None:
        """Retire the versions of ended jobs and collect garbage; what is unavailable now is deferred."""
        async with self._tidying:
            await self._deferred_if_unavailable(self.retire_ended(ended_before))
            await self._deferred_if_unavailable(self.collect_once())

    @staticmethod
    async def _deferred_if_unavailable(action: Awaitable[None]) -> None:
        try:
            await action
        except (BusUnavailable, NotFound, StoreFull, StoreUnavailable, Undecodable) as error:
            log.warning("collection_deferred", error=str(error))

    async def retire_ended(self, before: float = math.inf) -> None:
        """Retire all but the last version of jobs that ended `before`; pinned ones and bases stay. See `EndedJobs`."""
        ended = await self._ended_jobs.ids(before)
        for job_id in [job.job_id for job in self._versions.all() if job.job_id in ended]:
            async with self._versions.lock(job_id):
                job = self._versions.get(job_id)
                if (after := versions.retire(job, keep=1)) != job:
                    await self._versions.save(after)

    async def collect_once(self) -> None:
        """Remove retired versions, abandoned parts, and unreferenced chunks.

        Raises:
            Undecodable, NotFound: the chunks that a job refers to are unknown, so nothing was removed.

        """
        self._versions.check_all_readable()
        now = self._clock()
        # Read before the references: a chunk that is referenced for the first time later has also been used later.
        last_used = await self._chunks.last_used()
        jobs = [await self._references_of(job_id, now) for job_id in await self._documents.jobs()]
        derived_from = await self._remove_chunks(last_used, jobs, now)
        for job in jobs:
            await self._deltas.forget(job.versions.job_id, job.outdated)
            await self._remove_retired(job, derived_from)

    async def _references_of(self, job_id: str, now: float) -> _References:
        async with self._versions.lock(job_id):
            job = self._versions.get(job_id)
            needed = await self._staged_chunks(job, now)
            for version in job.versions:
                needed |= await self._chunks_of(job_id, version.version)
            chunks_of = {old.version: await self._chunks_of_retired(job_id, old.version) for old in job.retired}
            retired: dict[str, float] = {}
            for old in job.retired:
                retired |= dict.fromkeys(chunks_of[old.version], old.committed_at)
            deltas = await self._deltas.survey(job)
        return _References(job, needed | deltas.referenced, retired | deltas.dropped, chunks_of, deltas.outdated)

    async def _remove_chunks(self, last_used: Mapping[str, float], jobs: Sequence[_References], now: float) -> set[str]:
        """Remove the chunks that are garbage; return those that remain for the chunks that are derived from them."""
        needed: set[str] = set().union(*(job.needed for job in jobs))
        retired: dict[str, float] = {}
        for job in jobs:
            retired |= job.retired
        abandoned = garbage(self._chunks.derived_last_used(), needed, retired, now=now, grace_s=UPLOAD_GRACE_S)
        self._chunks.drop(abandoned)
        derived_from = self._chunks.inputs()
        removable = garbage(last_used, needed | derived_from, retired, now=now, grace_s=UPLOAD_GRACE_S)
        if removable:
            await self._chunks.sync()  # chunks written in the meantime, before the bases that led to them are removed
        await self._chunks.remove(removable)
        self._metrics.chunks_removed.inc(len(removable))
        return derived_from

    async def _remove_retired(self, job: _References, derived_from: set[str]) -> None:
        """Remove retired versions; one whose chunks are bases stays, so that they are garbage once they are not."""
        job_id = job.versions.job_id
        removable = tuple(old for old in job.versions.retired if job.chunks_of[old.version].isdisjoint(derived_from))
        if not removable:
            return
        for old in removable:
            await self._documents.remove_manifest(job_id, old.version)
            log.info("version_removed", job=job_id, version=old.version)
        async with self._versions.lock(job_id):
            await self._versions.save(versions.forget_retired(self._versions.get(job_id), removable))

    async def _staged_chunks(self, job: JobVersions, now: float) -> set[str]:
        """Return the chunks of the uploads in progress; remove the parts of others."""
        chunks: set[str] = set()
        for part in await self._documents.parts(job.job_id):
            if part.version <= job.head or part.staged_at < now - UPLOAD_GRACE_S:
                await self._documents.remove_part(job.job_id, part)
            else:
                data = await self._documents.part(job.job_id, part.version, part.rank)
                content = await asyncio.to_thread(Part.decode, data)
                chunks |= {blob.digest for blob in (*content.chunks, *content.edges)}
        return chunks

    async def _chunks_of_retired(self, job_id: str, version: int) -> set[str]:
        try:
            return await self._chunks_of(job_id, version)
        except NotFound:
            # The process was killed just after it had removed the manifest.
            return set()

    async def _chunks_of(self, job_id: str, version: int) -> set[str]:
        data = await self._documents.manifest(job_id, version)
        return {chunk.digest for chunk in (await asyncio.to_thread(Manifest.decode, data)).chunks()}
