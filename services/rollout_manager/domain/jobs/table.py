"""All jobs that the manager knows, each with its record, its progress and its audit.

An entry is created when its job is created or recovered, and dropped when the job is forgotten. Its parts end earlier:
the progress with the job, the audit once no late frame can arrive. Reading creates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar, overload

from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.jobs.progress import JobProgress
from rlboost.services.rollout_manager.domain.jobs.record import Job

_Part = TypeVar("_Part")
_Default = TypeVar("_Default")


@dataclass(slots=True)
class JobEntry:
    """What the manager knows of one job."""

    record: Job
    progress: JobProgress | None
    """None once the job has ended."""
    audit: Audit | None
    """None once no late frame can arrive: Redis has it."""


class JobParts(Mapping[str, _Part]):
    """Job id -> one part of its entry; jobs without that part, ended or unknown, are not in it."""

    def __init__(self, entries: Mapping[str, JobEntry], part_of: Callable[[JobEntry], _Part | None]) -> None:
        self._entries, self._part_of = entries, part_of

    def __getitem__(self, job_id: str) -> _Part:
        part = self._part_of(self._entries[job_id])
        if part is None:
            raise KeyError(job_id)
        return part

    @overload
    def get(self, job_id: str, /) -> _Part | None: ...

    @overload
    def get(self, job_id: str, /, default: _Part | _Default) -> _Part | _Default: ...

    def get(self, job_id: str, /, default: object = None) -> object:
        """Return the part of this job, the default if it has none."""
        entry = self._entries.get(job_id)
        part = None if entry is None else self._part_of(entry)
        return default if part is None else part

    def __iter__(self) -> Iterator[str]:
        return (job_id for job_id, entry in self._entries.items() if self._part_of(entry) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class JobTable(MutableMapping[str, Job]):
    """Job id -> the job's record, ended jobs included until they are forgotten."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[str, JobEntry] = {}
        self._by_no: dict[int, JobEntry] = {}
        self._active: list[Job] = []
        self.progress: Mapping[str, JobProgress] = JobParts(self._entries, attrgetter("progress"))
        """Job id -> progress of the jobs that have not ended."""
        self.audits: Mapping[str, Audit] = JobParts(self._entries, attrgetter("audit"))
        """Job id -> audit of the jobs whose late frames are still counted."""

    def add(self, job: Job, audit: Audit | None = None) -> None:
        """Add a job, with the audit that an earlier manager stored; an ended job gets neither progress nor audit."""
        entry = JobEntry(job, None, None) if job.ended else JobEntry(job, JobProgress(), audit or Audit())
        self._entries[job.id] = self._by_no[job.no] = entry
        self._active = sorted((j for j in self.values() if not j.ended), key=lambda j: j.no)

    def numbered(self, job_no: int) -> JobEntry | None:
        """Return the entry of the job with this number, None if it is unknown."""
        return self._by_no.get(job_no)

    def active(self) -> list[Job]:
        """Return the jobs that have not ended, oldest first."""
        self._active = [job for job in self._active if not job.ended]
        return list(self._active)

    def drop_progress(self, job_id: str) -> None:
        """Drop the progress of a job that has ended."""
        self._entries[job_id].progress = None

    def close_audit(self, job_id: str) -> None:
        """Drop the audit of a job that ended a while ago: later frames do not count."""
        self._entries[job_id].audit = None

    def __getitem__(self, job_id: str) -> Job:
        return self._entries[job_id].record

    def __setitem__(self, job_id: str, job: Job) -> None:
        assert job_id == job.id
        self.add(job)

    def __delitem__(self, job_id: str) -> None:
        del self._by_no[self._entries.pop(job_id).record.no]

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
