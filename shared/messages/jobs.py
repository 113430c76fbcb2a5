"""Jobs: commands, reports, events, weight versions, and messages that could not be handled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlboost.shared.messages.codec import (
    Count,
    EventKind,
    HourlyPrice,
    JobId,
    Message,
    Seconds,
    UnixTime,
    Version,
    message,
)
from rlboost.shared.messages.workers import Wait

JobState = Literal["pending", "running", "paused", "completed", "failed", "cancelled"]
ENDED: frozenset[JobState] = frozenset({"completed", "failed", "cancelled"})
"""The states of a job that never runs again."""
ENDED_JOB_RETENTION_S = 7 * 24 * 3600.0
"""How long an ended job and its streams are retained."""


@message
class JobCommand(Message):
    """REST API of the manager -> managers and trainers: a signed command on a job. Idempotent on (job_id, action)."""

    command_id: str
    action: Literal["create", "pause", "resume", "cancel"]
    job_id: JobId
    job_no: Annotated[int, Field(ge=0, lt=1 << 16)]
    spec_json: str = ""
    """The resolved job file (`shared.job.spec.JobSpec`) as JSON; only with `create`."""
    signature: str = ""
    """See `shared.http.access`."""


@message
class JobReport(Message):
    """Trainer -> manager: the job's state changed."""

    job_id: str
    state: JobState
    step: Count
    error: str = ""
    trainer: str = ""
    """Name of the trainer that runs the job; reserved workers that name it share their device with it."""


class TrainerStatus(Message):
    """What a trainer does for a job: as JSON the value of its lease on the job."""

    trainer: str
    """Unique to the trainer's process."""
    phase: str
    step: Count
    """The step, from 0."""
    phase_since: UnixTime
    """When the phase began (Unix seconds)."""
    price_per_hour: HourlyPrice
    """Dollars for its machines, beyond what its reserved workers' prices cover."""
    waiting: Wait | None
    """What it waits for; of several waits the one that began first."""
    at: UnixTime
    """When this was written (Unix seconds), so that each renewal changes the value."""


@message
class StepReport(Message):
    """Trainer -> manager: one training step is complete and its weights are committed. Idempotent on (job, step).

    The evaluation after the last training step sends one, too.
    """

    job_id: str
    step: Count
    """The completed step, from 0; the next step is `step + 1`. Of the last evaluation: the number of training steps."""
    metrics: dict[str, float]
    checkpointed_step: Count = 0
    """Samples of earlier steps will not be requested again."""
    wait_s: Seconds = 0.0
    """How long the trainer waited for samples while the device was its own."""
    train_s: Seconds = 0.0
    """How long the trainer trained."""
    warnings: list[str] = Field(default_factory=list)
    """The warnings about the job's learning that hold after this step, one line each."""


@message
class Event(Message):
    """Any service -> users: an event of a job. Best effort; no decision depends on it."""

    kind: EventKind
    at: UnixTime
    source: str
    fields: dict[str, Any] = Field(default_factory=dict)


@message
class WeightsCommitted(Message):
    """Weight store -> all: this version is complete and verified."""

    job_id: str
    version: Version
    manifest_digest: str
    n_bytes: Count
    at: UnixTime
    base: str = ""
    """Identity of the model's weights: of this version, or of the one that this adapter belongs to. Jobs with the same
    one may share workers. Empty of releases that did not say it."""


@message
class DeadLetter(Message):
    """Any service -> users: a message that did not decode, or failed too often, with the reason."""

    stream: str
    entry_id: str
    consumer: str
    reason: str
    body: bytes
    at: float
