"""The versions of each job, as its document says, and the lock under which they change."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import structlog

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.services.weight_store.ports import Documents
from rlboost.shared.errors import Conflict, NotFound, Undecodable

log = structlog.get_logger(__name__)


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
