"""Effects: decisions as values, and how each is written.

Only `loop` executes them, those of one turn in one transaction and in their order. A `Store` changes the stored state;
functions build it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlboost.services.rollout_manager.domain.jobs import Audit, Job, to_json
from rlboost.shared.messages import (
    ENDED_JOB_RETENTION_S,
    Closed,
    Dismissed,
    Event,
    GroupRequested,
    Message,
    SampleDropped,
    SampleFinished,
    WorkerJoined,
)
from rlboost.shared.messages.codec import encode
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Delete, Expire, HashDelete, HashSet, Op, Trim, dead_letter_op
from rlboost.shared.streams.job_logs import log_ops

FAILED = "failed"
"""Cause of a dropped sample that failed on several workers."""
REFUSED = "refused"
"""Cause of a dropped sample whose version no worker could load."""
COMMANDS_MAX_LEN = 4096
"""Commands of one worker: far more than a live worker leaves unread."""
ENDED_SAMPLES_RETENTION_S = 600.0
"""How long the samples that an ended job has not trained stay: its trainer may still read them, no other process."""
DISMISSAL_TTL_S = 120.0
"""How long a worker that was declared lost can find its dismissal, when it reconnects."""
_MAX_ENTRY_ID = f"{(1 << 64) - 1}-0"
"""The largest entry id; no stream reaches it."""
_EXTERNAL_KEYS = (names.trainer_lease, names.trainer_epoch, names.external_trainer, names.external_groups)
"""Deleted at the end of an external job."""
_JOB_KEYS = (
    names.rollouts_requested,
    names.job_events,
    names.job_samples,
    names.job_lengths,
    names.job_curriculum,
    names.job_resampled,
    names.job_paid_calls,
    names.job_profile,
    names.job_offers,
    names.job_metrics,
    names.job_audit,
    names.job_refused,
)


class Now(NamedTuple):
    """One moment on both clocks, in seconds: `mono` for durations, `wall` (Unix) for people."""

    mono: float
    wall: float


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
class Store:
    """Change the stored state, or append to events, logs or dead letters."""

    ops: tuple[Op, ...]


Effect = Record | Send | Deliver | Refuse | Store


def one_turn(effects: Iterable[Effect]) -> list[Effect]:
    """Return the effects of one turn; the ends of its samples are one record, the last effect."""
    ended: list[bytes] = []
    others: list[Effect] = []
    for effect in effects:
        if isinstance(effect, Record) and isinstance(effect.message, Closed):
            ended.append(effect.message.samples)
        else:
            others.append(effect)
    return [*others, Record(Closed(samples=b"".join(ended)))] if ended else others


def operations(effects: Iterable[Effect]) -> list[Op]:
    """Return the operations of one turn's effects, in order."""
    ops: list[Op] = []
    for effect in one_turn(effects):
        match effect:
            case Record(message):
                ops.append(Append(names.TOKEN_LOG, message))
            case Send(worker, message):
                ops.append(Append(names.worker_commands(worker), message, COMMANDS_MAX_LEN))
            case Deliver(job_id, message):
                ops.append(Append(names.rollouts_finished(job_id), message))
            case Refuse():
                pass  # `CompletionWaiters.fail` reports it to the client
            case Store(stored):
                ops += stored
    return ops


def bookkeeping(
    cursors: Mapping[str, str], audits: Mapping[str, Audit], closed_streams: Collection[str] = ()
) -> list[Op]:
    """Return the operations that store the read positions of streams and the audits.

    In one transaction with the effects of the entries that were read, they make every message count exactly once: a
    restarted manager continues after the last entry whose effects are stored.
    """
    ops: list[Op] = [HashSet(names.MANAGER_CURSORS, cursors)] if cursors else []
    if closed_streams:
        ops.append(HashDelete(names.MANAGER_CURSORS, tuple(closed_streams)))
    ops += [HashSet(names.job_audit(job), {"counters": audit.model_dump_json()}) for job, audit in audits.items()]
    return ops


# --- what is stored ---------------------------------------------------------------------------------------------------


def event(kind: str, now: Now, to_job: str | None = None, /, **fields: Any) -> Store:
    """Append an event to those of one job, or else of the fleet: the readers of a job join the two."""
    return emit(to_job, Event(kind=kind, at=now.wall, source="manager", fields=fields))


def emit(job_id: str | None, happened: Event) -> Store:
    """Append an event, whatever its source; see `event`."""
    if job_id is None:
        return Store((Append(names.FLEET_EVENTS, happened, names.MAX_FLEET_EVENTS),))
    return Store((Append(names.job_events(job_id), happened, names.MAX_EVENTS),))


def log_lines(job_id: str, worker: str, lines: Sequence[tuple[float, str]]) -> Store:
    """Append lines of a worker's log, each a time and a text, to a job's log."""
    return Store(tuple(log_ops(job_id, worker, lines)))


def save_job(job: Job) -> Store:
    """Store the job's record as it is now: after its last change of the turn. What an ended job has stored expires."""
    ops: list[Op] = [HashSet(names.JOBS, {job.id: to_json(job)})]
    if job.ended:
        ops += [Expire(key(job.id), ENDED_JOB_RETENTION_S) for key in _JOB_KEYS]
        ops.append(Expire(names.rollouts_finished(job.id), ENDED_SAMPLES_RETENTION_S))
        if job.spec.kind == "external":  # whose trainer may be gone: from now on it is superseded
            ops += [Delete(key(job.id)) for key in _EXTERNAL_KEYS]
    return Store(tuple(ops))


def forget_job(job_id: str) -> Store:
    """Drop the record of a job that ended long ago, and what was stored after its end under keys that were new then."""
    # The cursor is deleted in the turn after the job's end, unless the manager is killed before its commit.
    cursor = HashDelete(names.MANAGER_CURSORS, (names.rollouts_requested(job_id),))
    keys = (names.rollouts_finished, *_JOB_KEYS)
    return Store((HashDelete(names.JOBS, (job_id,)), cursor, *(Delete(key(job_id)) for key in keys)))


def save_metrics(job_id: str, step: int, metrics: dict[str, float]) -> Store:
    """Store the metrics of one step."""
    return Store((HashSet(names.job_metrics(job_id), {str(step): json.dumps(metrics)}),))


def save_refusal(job_id: str, version: int, reason: str) -> Store:
    """Store that a worker could not load a version: the weight store then accepts one with other tensors."""
    return Store((HashSet(names.job_refused(job_id), {str(version): reason}),))


def save_length(job_id: str, prompt: str, length: float | None) -> Store:
    """Store the mean length of a prompt's samples, in tokens; None deletes it."""
    key = names.job_lengths(job_id)
    return Store((HashDelete(key, (prompt,)) if length is None else HashSet(key, {prompt: repr(length)}),))


def store_turn(request: GroupRequested, end: SampleFinished | SampleDropped) -> Store:
    """Store the end of a turn with its session, from which the agent that called for it gets it."""
    text = encode(end).hex()
    key = names.session(request.job_id, request.session)
    return Store((HashSet(key, {names.session_finished(end.sample): text}), Expire(key, ENDED_JOB_RETENTION_S)))


def save_worker(joined: WorkerJoined) -> Store:
    """Store that this worker exists."""
    record = HashSet(names.FLEET, {joined.worker: joined.model_dump_json()})
    return Store((record, HashSet(names.WEIGHT_PEERS, {joined.worker: ""})))


def forget_worker(worker: str, reason: str = "declared lost: no heartbeat and no lease") -> Store:
    """Drop the record of a worker that left or was lost, and its commands after a while.

    Args:
        worker: its id.
        reason: the reason for its dismissal, should the worker still run.

    """
    commands = names.worker_commands(worker)
    return Store(
        (
            HashDelete(names.FLEET, (worker,)),
            HashDelete(names.WEIGHT_PEERS, (worker,)),
            Trim(commands, _MAX_ENTRY_ID),  # not deleted, so that ids keep increasing for a reader that returns
            Append(commands, Dismissed(reason=f"{reason}; its samples were reassigned")),
            Expire(commands, DISMISSAL_TTL_S),
        )
    )


def dead_letter(stream: str, entry_id: str, message: Message, reason: str, now: Now) -> Store:
    """Append an entry, or a sample that is not retried any more with its tokens, to the dead letters."""
    return Store((dead_letter_op(stream, entry_id, "manager", reason, encode(message), now.wall),))
