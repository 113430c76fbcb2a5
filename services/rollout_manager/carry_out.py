"""Actions of the domain as operations of one transaction on the bus."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping

from services.rollout_manager.domain.actions import (
    Action,
    Bury,
    BurySample,
    Deliver,
    ForgetJob,
    ForgetKept,
    ForgetWorker,
    Keep,
    Record,
    Refuse,
    SaveJob,
    SaveLength,
    SaveMetrics,
    SaveWorker,
    Send,
    Tell,
)
from services.rollout_manager.domain.audit import Audit
from services.rollout_manager.domain.compaction import ENDED_JOB_KEPT_S
from services.rollout_manager.domain.jobs import to_json
from shared import names
from shared.bus import Append, Delete, Expire, HashDelete, HashSet, Op, Trim
from shared.codec import encode
from shared.messages import DeadLetter, Dismissed

_BEHIND_ALL = f"{(1 << 64) - 1}-0"
"""An entry id that no stream reaches."""
EVENTS_KEPT = 20_000
DEAD_LETTERS_KEPT = 10_000
COMMANDS_KEPT = 4096
"""Of one worker: far more than it can fall behind by without being lost."""
DISMISSED_KEPT_S = 120.0
"""A worker that was cut off this long finds in its commands that it was dismissed."""
_KEYS_OF_A_JOB = (
    names.rollouts_requested,
    names.rollouts_finished,
    names.job_events,
    names.job_samples,
    names.job_lengths,
    names.job_curriculum,
    names.job_resampled,
    names.job_metrics,
    names.job_audit,
)


def operations(actions: Iterable[Action]) -> list[Op]:
    """Return what carries out the actions, in their order."""
    ops: list[Op] = []
    for action in actions:
        match action:
            case Record(message):
                ops.append(Append(names.TOKEN_LOG, message))
            case Send(worker, message):
                ops.append(Append(names.worker_commands(worker), message, COMMANDS_KEPT))
            case Deliver(job_id, message):
                ops.append(Append(names.rollouts_finished(job_id), message))
            case Refuse():
                pass  # nothing on the bus: `serving.Desk` tells the client
            case Tell(job_id, event):
                ops.append(Append(names.job_events(job_id), event, EVENTS_KEPT))
            case Keep(job_id, message):
                ops.append(Append(names.job_kept(job_id), message))
            case ForgetKept(job_id):
                ops.append(Delete(names.job_kept(job_id)))
            case _:
                ops += _state_operations(action)
    return ops


def _state_operations(action: Action) -> list[Op]:  # noqa: PLR0911 - one flat table
    match action:
        case SaveJob(job):
            save = HashSet(names.JOBS, {job.id: to_json(job)})
            return [save, *(Expire(key(job.id), ENDED_JOB_KEPT_S) for key in _KEYS_OF_A_JOB if job.ended)]
        case ForgetJob(job_id):
            return [HashDelete(names.JOBS, (job_id,))]
        case SaveMetrics(job_id, step, metrics):
            return [HashSet(names.job_metrics(job_id), {str(step): json.dumps(metrics)})]
        case SaveLength(job_id, prompt, length):
            key = names.job_lengths(job_id)
            return [HashDelete(key, (prompt,)) if length is None else HashSet(key, {prompt: repr(length)})]
        case SaveWorker(joined):
            return [HashSet(names.FLEET, {joined.worker: joined.model_dump_json()})]
        case ForgetWorker(worker):
            commands = names.worker_commands(worker)
            dismissed = Dismissed(reason="declared lost: no beat and no lease; your samples are elsewhere")
            return [
                HashDelete(names.FLEET, (worker,)),
                Trim(commands, _BEHIND_ALL),  # not deleted: ids go on, so whoever still reads finds what follows
                Append(commands, dismissed),
                Expire(commands, DISMISSED_KEPT_S),
            ]
        case Bury(stream, entry_id, message, reason):
            letter = DeadLetter(
                stream=stream,
                entry_id=entry_id,
                consumer="manager",
                reason=reason,
                body=encode(message),
                at=time.time(),
            )
            return [Append(names.DEAD_LETTERS, letter, DEAD_LETTERS_KEPT)]
        case BurySample(entry_id, sample, reason):
            return _state_operations(Bury(names.TOKEN_LOG, entry_id, sample, reason))
        case _:
            raise AssertionError(action)


def bookkeeping(cursors: Mapping[str, str], audits: Mapping[str, Audit], over: Collection[str] = ()) -> list[Op]:
    """Return what stores how far the streams were read, and the audit as of there.

    In the same transaction as the actions that followed from what was read, this makes every message count exactly
    once: a manager that starts again goes on behind the last entry whose effects are stored.
    """
    ops: list[Op] = [HashSet(names.MANAGER_CURSORS, cursors)] if cursors else []
    if over:
        ops.append(HashDelete(names.MANAGER_CURSORS, tuple(over)))
    ops += [HashSet(names.job_audit(job), {"counters": audit.model_dump_json()}) for job, audit in audits.items()]
    return ops
