"""The models of a store: each job's versions, as its document says, and the lock under which they change."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import structlog

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.services.weight_store.ports import Documents
from rlboost.shared.errors import Conflict, NotFound, Undecodable

log = structlog.get_logger(__name__)


class Models:
    """The models of all jobs. A job whose document cannot be parsed is quarantined: nothing is served or changed."""

    def __init__(self, documents: Documents) -> None:
        """Read nothing before `load`."""
        self._documents = documents
        self._models: dict[str, JobVersions] = {}
        self._unreadable: dict[str, str] = {}
        """Job -> why its document cannot be parsed."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load(self) -> None:
        """Read every model."""
        for job_id in await self._documents.jobs():
            try:
                self._models[job_id] = await self._documents.model(job_id)
            except Undecodable as error:
                self._unreadable[job_id] = str(error)
                log.error("model_quarantined", job=job_id, reason=str(error))  # noqa: TRY400 - the cause is in the message; a traceback adds nothing

    def lock(self, job_id: str) -> asyncio.Lock:
        """Return the lock that is held while a job's documents change."""
        return self._locks[job_id]

    def all(self) -> Sequence[JobVersions]:
        """Return every model, by job id."""
        return [model for _, model in sorted(self._models.items())]

    def get(self, job_id: str) -> JobVersions:
        """Return a job's model, an empty one before its first commit; raises `Conflict` if it is quarantined."""
        if reason := self._unreadable.get(job_id):
            raise Conflict(
                f"the weights of job {job_id} are quarantined: {reason}. Restore the document from a backup or remove "
                f"the folder models/{job_id}, then restart the weight store"
            )
        return self._models.get(job_id, JobVersions(job_id))

    def committed(self, job_id: str) -> JobVersions:
        """Return the model of a job with a version.

        Raises:
            NotFound: nothing was committed for this job.
            Conflict: it is quarantined.

        """
        model = self.get(job_id)
        if not model.versions:
            raise NotFound(f"job {job_id} has no committed version")
        return model

    def check_all_readable(self) -> None:
        """Raise `Undecodable` if a job is quarantined."""
        if self._unreadable:
            raise Undecodable(f"the documents of {', '.join(sorted(self._unreadable))} cannot be parsed")

    async def save(self, model: JobVersions) -> None:
        """Replace a model; the caller holds the job's lock."""
        await self._documents.save_model(model)
        self._models[model.job_id] = model
