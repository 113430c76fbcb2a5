"""Effects: decisions as values. Only `app` executes them, those of one turn in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.shared.messages import Closed, Event, Message, Restated, WorkerJoined
from rlboost.shared.wire.columns import U64, pack

FAILED = "failed"
"""Cause of a dropped sample that failed on several workers."""


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
    """Report to the client that waits for a sample that it will not be delivered, and why; after the transaction."""

    sample: int
    reason: str
    is_retryable: bool
    """True if requesting the completion again may help."""


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Append to a job's events."""

    job_id: str
    event: Event


@dataclass(frozen=True, slots=True)
class EmitLogLines:
    """Append lines of a worker's log, each a time and a text, to a job's log."""

    job_id: str
    worker: str
    lines: Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store the job's record."""

    job: Job


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """Drop the record of a job that ended long ago."""

    job_id: str


@dataclass(frozen=True, slots=True)
class QuarantineMessage:
    """Store a message about a quarantined job."""

    job_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class ClearQuarantine:
    """Drop the stored messages about a job: they were applied."""

    job_id: str


@dataclass(frozen=True, slots=True)
class SaveMetrics:
    """Store the metrics of one step."""

    job_id: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveLength:
    """Store the mean length of a prompt's samples, in tokens; None deletes it."""

    job_id: str
    prompt: str
    length: float | None


@dataclass(frozen=True, slots=True)
class SaveWorker:
    """Store that this worker exists."""

    joined: WorkerJoined


@dataclass(frozen=True, slots=True)
class ForgetWorker:
    """Drop the record of a worker that left or was lost, and its commands after a while."""

    worker: str
    reason: str = "declared lost: no heartbeat and no lease"
    """The reason for its dismissal, should the worker still run."""


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """Append an entry to the dead letters."""

    stream: str
    entry_id: str
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetterSample:
    """Append a sample that is not retried any more, with its tokens, to the dead letters."""

    entry_id: str
    sample: Restated
    reason: str


StateEffect = (
    SaveJob | ForgetJob | SaveMetrics | SaveLength | SaveWorker | ForgetWorker | DeadLetterEntry | DeadLetterSample
)
"""What changes the stored state, or the dead letters."""
Effect = Record | Send | Deliver | Refuse | EmitEvent | EmitLogLines | QuarantineMessage | ClearQuarantine | StateEffect


class Outbox:
    """Collects the effects of one turn, in order."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self._closed: list[int] = []

    def add(self, effect: Effect) -> None:
        """Add an effect."""
        self.effects.append(effect)

    def record(self, message: Message) -> None:
        """Append to the token log."""
        self.effects.append(Record(message))

    def record_closed(self, sample_id: int) -> None:
        """Record the end of a sample; those of one turn share an entry of the token log."""
        self._closed.append(sample_id)

    def send(self, worker_id: str, message: Message) -> None:
        """Command a worker."""
        self.effects.append(Send(worker_id, message))

    def deliver(self, job_id: str, message: Message) -> None:
        """Append to a job's finished samples."""
        self.effects.append(Deliver(job_id, message))

    def take(self) -> list[Effect]:
        """Return the effects and start the next turn."""
        if self._closed:
            self.record(Closed(samples=pack(self._closed, U64)))
            self._closed = []
        effects, self.effects = self.effects, []
        return effects
