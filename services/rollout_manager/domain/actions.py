"""What the domain wants done, as values. Only `app` carries them out, all of one turn in one transaction."""

from __future__ import annotations

from dataclasses import dataclass

from services.rollout_manager.domain.jobs import Job
from shared.messages import Event, Message, Restated, WorkerJoined


@dataclass(frozen=True, slots=True)
class Record:
    """Append to the token log."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Append to one worker's commands."""

    worker: str
    message: Message


@dataclass(frozen=True, slots=True)
class Deliver:
    """Append to a job's `rollouts.finished`."""

    job_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the client that waits for a sample that it will not come, and why."""

    sample: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Append to a job's events."""

    job_id: str
    event: Event


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store the job's record."""

    job: Job


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """Drop the record of a job that ended long ago."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep what was said of a job that is set aside."""

    job_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class ForgetKept:
    """Drop what was kept of a job: it was taken in."""

    job_id: str


@dataclass(frozen=True, slots=True)
class SaveMetrics:
    """Store the metrics of one step."""

    job_id: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveLength:
    """Remember how long a prompt's samples get, in tokens; None forgets it."""

    job_id: str
    prompt: str
    length: float | None


@dataclass(frozen=True, slots=True)
class SaveWorker:
    """Remember that this worker exists."""

    joined: WorkerJoined


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """The worker is gone for good: drop its record, and its commands after a while."""

    worker: str


@dataclass(frozen=True, slots=True)
class Bury:
    """Append to the dead letters."""

    stream: str
    entry_id: str
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class BurySample:
    """Append a sample that will not be tried again, whole, to the dead letters."""

    entry_id: str
    sample: Restated
    reason: str


Action = (
    Record
    | Send
    | Deliver
    | Refuse
    | Tell
    | SaveJob
    | ForgetJob
    | Keep
    | ForgetKept
    | SaveMetrics
    | SaveLength
    | SaveWorker
    | ForgetWorker
    | Bury
    | BurySample
)
