"""Translates the domain's effects into the operations of one transaction on the bus."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from typing import assert_never

from rlboost.services.rollout_manager.domain.effects import (
    ClearQuarantine,
    DeadLetterEntry,
    DeadLetterSample,
    Deliver,
    Effect,
    EmitEvent,
    EmitLogLines,
    ForgetJob,
    ForgetWorker,
    QuarantineMessage,
    Record,
    Refuse,
    SaveJob,
    SaveLength,
    SaveMetrics,
    SaveWorker,
    Send,
    StateEffect,
)
from rlboost.services.rollout_manager.domain.jobs.audit import Audit
from rlboost.services.rollout_manager.domain.jobs.record import to_json
from rlboost.shared.messages import ENDED_JOB_RETENTION_S, Dismissed
from rlboost.shared.messages.codec import encode
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Delete, Expire, HashDelete, HashSet, Op, Trim
from rlboost.shared.streams.dead_letters import dead_letter_op
from rlboost.shared.streams.job_logs import log_ops

_MAX_ENTRY_ID = f"{(1 << 64) - 1}-0"
"""The largest entry id; no stream reaches it."""
COMMANDS_MAX_LEN = 4096
"""Commands of one worker: far more than a live worker leaves unread."""
DISMISSAL_TTL_S = 120.0
"""How long a worker that was declared lost can find its dismissal, when it reconnects."""
_JOB_KEYS = (
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


def operations(effects: Iterable[Effect]) -> list[Op]:
    """Return the operations of the effects, in order."""
    ops: list[Op] = []
    for effect in effects:
        match effect:
            case Record(message):
                ops.append(Append(names.TOKEN_LOG, message))
            case Send(worker, message):
                ops.append(Append(names.worker_commands(worker), message, COMMANDS_MAX_LEN))
            case Deliver(job_id, message):
                ops.append(Append(names.rollouts_finished(job_id), message))
            case Refuse():
                pass  # not on the bus: `CompletionWaiters.fail` reports it to the client
            case EmitEvent(job_id, event):
                ops.append(Append(names.job_events(job_id), event, names.MAX_EVENTS))
            case EmitLogLines(job_id, worker, lines):
                ops += log_ops(job_id, worker, lines)
            case QuarantineMessage(job_id, message):
                ops.append(Append(names.job_quarantine(job_id), message))
            case ClearQuarantine(job_id):
                ops.append(Delete(names.job_quarantine(job_id)))
            case _:
                ops += _state_operations(effect)
    return ops


def _state_operations(effect: StateEffect) -> list[Op]:  # noqa: PLR0911 - one flat table
    match effect:
        case SaveJob(job):
            save = HashSet(names.JOBS, {job.id: to_json(job)})
            return [save, *(Expire(key(job.id), ENDED_JOB_RETENTION_S) for key in _JOB_KEYS if job.ended)]
        case ForgetJob(job_id):
            # The cursor is deleted in the turn after the job's end, unless the manager is killed before its commit.
            return [
                HashDelete(names.JOBS, (job_id,)),
                HashDelete(names.MANAGER_CURSORS, (names.rollouts_requested(job_id),)),
            ]
        case SaveMetrics(job_id, step, metrics):
            return [HashSet(names.job_metrics(job_id), {str(step): json.dumps(metrics)})]
        case SaveLength(job_id, prompt, length):
            key = names.job_lengths(job_id)
            return [HashDelete(key, (prompt,)) if length is None else HashSet(key, {prompt: repr(length)})]
        case SaveWorker(joined):
            return [
                HashSet(names.FLEET, {joined.worker: joined.model_dump_json()}),
                HashSet(names.WEIGHT_PEERS, {joined.worker: ""}),
            ]
        case ForgetWorker(worker, reason):
            commands = names.worker_commands(worker)
            dismissed = Dismissed(reason=f"{reason}; its samples were reassigned")
            return [
                HashDelete(names.FLEET, (worker,)),
                HashDelete(names.WEIGHT_PEERS, (worker,)),
                Trim(commands, _MAX_ENTRY_ID),  # not deleted, so that ids keep increasing for a reader that returns
                Append(commands, dismissed),
                Expire(commands, DISMISSAL_TTL_S),
            ]
        case DeadLetterEntry(stream, entry_id, message, reason):
            return [dead_letter_op(stream, entry_id, "manager", reason, encode(message), time.time())]
        case DeadLetterSample(entry_id, sample, reason):
            return _state_operations(DeadLetterEntry(names.TOKEN_LOG, entry_id, sample, reason))
        case _:
            assert_never(effect)


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
