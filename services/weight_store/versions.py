"""The versions of each job, as its document says, and the lock under which they change."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import structlog
from pydantic import ValidationError

from rlboost.services.weight_store.domain.versions import JobVersions, Version
from rlboost.services.weight_store.ports import Documents
from rlboost.shared.errors import BusUnavailable, Conflict, NotFound, Undecodable
from rlboost.shared.messages import WeightsCommitted
from rlboost.shared.process.waiting import Waits, retry_while
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.names import WEIGHTS_COMMITTED
from rlboost.shared.weights.manifest import Manifest, Part, digest_of
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
