"""Applies messages to the world, and returns the effects.

Every change may be repeated: streams are read again after a crash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from rlboost.services.rollout_manager.domain.effects import (
    Effect,
    Now,
    Record,
    emit,
    event,
    forget_worker,
    log_lines,
    save_job,
    save_metrics,
    save_refusal,
    save_worker,
)
from rlboost.services.rollout_manager.domain.jobs import Job, JobEntry, JobProgress, Jobs
from rlboost.services.rollout_manager.domain.placement import set_batch_cap, suspected_samples
from rlboost.services.rollout_manager.domain.queue import Queues, unassign, unassign_all
from rlboost.services.rollout_manager.domain.stalls import on_worker_left
from rlboost.services.rollout_manager.domain.step_windows import credit_generation, end_step
from rlboost.services.rollout_manager.domain.tokens import FrameOutcome, Ledger, Sample
from rlboost.services.rollout_manager.domain.windows import Window
from rlboost.services.rollout_manager.domain.workers import Fleet
from rlboost.services.rollout_manager.domain.world import World, apply_closed, drop, remove_sample
from rlboost.shared.errors import ConfigError, Unprocessable
from rlboost.shared.ids import is_served, job_of
from rlboost.shared.job.spec import AnyJob, parse_stored
from rlboost.shared.messages import (
    ENDED,
    Admitted,
    Closed,
    Event,
    GroupOpened,
    GroupRequested,
    JobCommand,
    JobReport,
    JobState,
    Message,
    Placed,
    PreemptionNotice,
    Restated,
    SampleDropped,
    SampleFailed,
    SampleFinished,
    SeedingEnded,
    SeedingReopened,
    SessionEnded,
    SessionRewarded,
    StepReport,
    TokenFrame,
    TurnAnswered,
    TurnOpened,
    WeightsCommitted,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLog,
)
from rlboost.shared.wire import U64, ints

_ORDER: tuple[tuple[type[Message], ...], ...] = (
    (JobCommand, JobReport, StepReport, WeightsCommitted),
    (GroupRequested,),
    (TokenFrame, SampleFailed, Admitted, Placed, Closed, Restated),
    # Last: a heartbeat in state "suspended" follows the frames that were flushed before it.
    (WorkerJoined, WorkerHeartbeat, WorkerEvent, WorkerLog, PreemptionNotice, WorkerLeft),
)
MAX_REASON_CHARS = 1000
"""Of why a version is refused: each sample that is dropped for it says so."""
MAX_EVENT_BYTES = 64 << 10
"""Of a worker's event as JSON: every client that follows the job gets it."""
_ORDER_OF = {message: order for order, messages in enumerate(_ORDER) for message in messages}


def apply_order(message: Message) -> int:
    """Return when a message is applied among those that were read together: the lowest first."""
    return _ORDER_OF.get(type(message), 0)


def apply_message(world: World, message: Message, entry_id: str, now: Now) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912 - one flat table
    """Apply a message that is new to this manager; return the effects.

    Raises:
        Unprocessable: the message is invalid; the caller appends it to the dead letters.

    """
    match message:
        case TokenFrame() | SampleFailed() | Admitted() | Placed() | Closed() | Restated():
            return apply_record(world, message, entry_id, counted=True)
        case GroupRequested():
            return _on_group_requested(world, message)
        case WorkerHeartbeat():
            return _on_heartbeat(world.jobs, world.fleet, world.queues, message, now)
        case WorkerJoined():
            return _on_joined(world.fleet, message, now)
        case PreemptionNotice():
            return _on_notice(world.fleet, message, now)
        case WorkerLeft():
            return _on_left(world, message, now)
        case WorkerEvent():
            return _on_worker_event(world, message)
        case WorkerLog():
            return _on_worker_log(world.jobs, message)
        case WeightsCommitted():
            return _on_committed(world.jobs, message)
        case JobCommand():
            return _on_command(world, message, now)
        case JobReport():
            return _on_job_report(world, message, now)
        case StepReport():
            return _on_step_report(world.jobs, message, now)
        case _:
            raise Unprocessable(f"a {message.tag} does not belong in this stream")


# --- the token log ----------------------------------------------------------------------------------------------------


def apply_record(world: World, message: Message, entry_id: str, *, counted: bool) -> list[Effect]:
    """Apply a record of the token log; return the effects.

    `counted` is false for records that the stored audit covers already. The manager's own records were audited when
    they were decided, except for tokens that a placement cuts and that had not been read by then.
    """
    match message:
        case TokenFrame():
            return apply_frames(world, [message], counted=counted)
        case SampleFailed():
            world.ledger.fail(message)
        case Admitted():
            _apply_admitted(world, message.request, entry_id)
        case Placed():
            _apply_placed(world.jobs, world.ledger, message, counted=counted)
        case Closed():
            apply_closed(world, ints(message.samples, U64))
        case Restated():
            _apply_restated(world.jobs, world.ledger, world.queues, message, entry_id)
        case _:
            raise Unprocessable(f"a {message.tag} does not belong in the token log")
    return []


def apply_frames(world: World, frames: Sequence[TokenFrame], *, counted: bool = True) -> list[Effect]:
    """Apply consecutive frames of the log at once; return the effects.

    Raises:
        Unprocessable: one of them is invalid, and nothing was changed: apply them one by one to find which.

    """
    outcome: FrameOutcome = world.ledger.extend(*frames)
    for worker_id, tokens in outcome.grown.items():
        if worker := world.fleet.workers.get(worker_id):
            worker.on_tokens(tokens)
    for sample_id in outcome.invalid:
        if worker := world.fleet.workers.get(world.ledger.samples[sample_id].worker):
            worker.invalid_samples.add(sample_id)
    # Tokens are missing between the ledger and a gap's frame: the owner's later frames cannot be used either.
    # After a failure, the owner's later frames leave a gap.
    gaps = [i for i in (*outcome.gaps, *outcome.invalid) if world.ledger.samples[i].worker in world.fleet.workers]
    effects: list[Effect] = []
    for sample_id in dict.fromkeys(gaps):
        effects += world.fleet.revoke(world.ledger.samples[sample_id])
    for sample_id in dict.fromkeys([*gaps, *outcome.released]):
        unassign(world.fleet, world.queues, world.ledger.samples[sample_id])
    if counted:
        world.jobs.count_frames(outcome)
    return effects


def _apply_admitted(world: World, request: GroupRequested, entry_id: str) -> None:
    first = world.ledger.samples.get(request.group)
    if first is not None and not first.first_id:
        # The record of an admission that this manager decided itself: now its log entry is known.
        world.ledger.set_admission_entry(request, entry_id)
        return
    # The samples of any other job were dropped when it ended, which a later record shows.
    if (job := world.jobs.get_active(request.job_id)) is None:
        return
    added = world.ledger.admit(request, entry_id)
    done = [sample.id for sample in added if job.progress.is_delivered(sample.id)]
    _queue(world.jobs, world.queues, added)
    for sample_id in done:
        remove_sample(world, sample_id)


def _apply_placed(jobs: Jobs, ledger: Ledger, message: Placed, *, counted: bool) -> None:
    for sample, cut in ledger.place(message):
        if counted and cut and (audit := jobs.audit_of(job_of(sample.id))):
            audit.tokens_regenerated["late"] += cut


def _apply_restated(jobs: Jobs, ledger: Ledger, queues: Queues, message: Restated, entry_id: str) -> None:
    known = message.sample in ledger.samples
    job = jobs.get_active(message.request.job_id)
    if job is None or (not known and job.progress.is_delivered(message.sample)):
        return  # closed after this was written
    ledger.restate(message, entry_id)
    if not known:
        _queue(jobs, queues, [ledger.samples[message.sample]])


def _queue(jobs: Jobs, queues: Queues, samples: Iterable[Sample]) -> None:
    """Count samples that the ledger has just admitted, and queue them."""
    for sample in samples:
        jobs.on_requested(sample)
        queues.admit(sample)


# --- requests ---------------------------------------------------------------------------------------------------------


def _on_group_requested(world: World, request: GroupRequested) -> list[Effect]:
    job = world.jobs.get(request.job_id)
    if job is None:
        raise Unprocessable(f"group {request.group} of the unknown job {request.job_id}")
    if job_of(request.group) != job.record.no:
        raise Unprocessable(
            f"group {request.group} is of job number {job_of(request.group)}, but {request.job_id} is {job.record.no}"
        )
    if job.record.ended or world.is_known(request):
        return []
    _queue(world.jobs, world.queues, world.ledger.admit(request, ""))
    audit = job.audit
    (audit.serving if is_served(request.group) else audit).requested += request.n
    return [Record(Admitted(request=request))]


def _on_committed(jobs: Jobs, message: WeightsCommitted) -> list[Effect]:
    jobs.on_committed(message.job_id, message.version, message.base)
    return []


def apply_delivered(progress: JobProgress, message: Message) -> None:
    """Rebuild, after a restart, what `rollouts.finished` shows to have been delivered."""
    match message:
        case SampleFinished() | SampleDropped():
            progress.on_delivered(message.sample)
        case SeedingEnded():
            progress.window = Window(message.step, message.window_s, "ended", lasted_s=message.window_s)
        case SeedingReopened():
            if progress.window:
                progress.window.phase, progress.window.reopened = "open", True
        case GroupOpened() | SessionEnded() | SessionRewarded() | TurnAnswered() | TurnOpened():
            pass  # notes for the trainer and its successor
        case _:
            raise Unprocessable(f"a {message.tag} does not belong among finished samples")


# --- workers ----------------------------------------------------------------------------------------------------------


def _on_joined(fleet: Fleet, message: WorkerJoined, now: Now) -> list[Effect]:
    if (worker := fleet.join(message, now.mono)) is None:
        return []
    worker.unbilled_startup_s = message.startup_s
    joined = event("worker_joined", now, worker=message.worker, role=message.role, worker_kind=message.kind)
    return [save_worker(message), joined]


def _on_heartbeat(jobs: Jobs, fleet: Fleet, queues: Queues, heartbeat: WorkerHeartbeat, now: Now) -> list[Effect]:
    worker = fleet.workers.get(heartbeat.worker)
    if worker is None:
        # It was unreachable until its dismissal expired: dismissed again, it joins as a new incarnation.
        return [forget_worker(heartbeat.worker)]
    credit_generation(jobs, worker, now)
    block_tokens = worker.kv.block_tokens
    before = fleet.on_heartbeat(worker, heartbeat, now.mono)
    if worker.kv.block_tokens != block_tokens:
        worker.set_samples(list(worker.samples.values()))
    job = jobs.get_active(worker.job_id)
    set_batch_cap(worker, job.progress.lengths.mean if job else 0.0)
    if heartbeat.last_command and worker.assigned_version and worker.state != "draining":
        worker.command_check.observe(
            worker.command_digest(), heartbeat.command_digest, heartbeat.last_command, now.mono
        )
    if before is None:
        return []
    role, job_id, state = worker.joined.role, worker.job, worker.state
    effects: list[Effect] = [
        event("worker_state", now, worker=worker.id, role=role, job_id=job_id, state=state, before=before)
    ]
    if worker.state == "suspended":
        # It flushed before it reported the state: all its tokens are in the ledger.
        effects += unassign_all(fleet, queues, worker, worker.in_order(), now, "suspended")
    return effects


def _on_notice(fleet: Fleet, notice: PreemptionNotice, now: Now) -> list[Effect]:
    worker = fleet.workers.get(notice.worker)
    if worker is None or worker.noticed:
        return []
    fleet.on_notice(worker)
    job_id, reason, lead_s = worker.job, notice.reason, notice.lead_s
    return [event("worker_notice", now, worker=worker.id, job_id=job_id, reason=reason, lead_s=lead_s)]


def _on_left(world: World, left: WorkerLeft, now: Now) -> list[Effect]:
    worker = world.fleet.workers.get(left.worker)
    if worker is None:
        return []
    running_at_failure = ints(left.running_at_failure, U64)
    if worker.noticed:
        running_at_failure = []  # a preemption: no sample is to blame
    running = [worker.samples[i] for i in running_at_failure if i in worker.samples]
    effects = on_worker_left(world.jobs, world.fleet, world.queues, worker, now, left.reason)
    for sample in suspected_samples(running):
        # A record of the log: every replay counts it as this manager does.
        reason = "the engine of its worker died or hung"
        failed = SampleFailed(worker=worker.id, sample=sample.id, attempt=sample.attempt, reason=reason)
        if world.ledger.fail(failed):
            effects.append(Record(failed))
    return effects


def _on_worker_event(world: World, message: WorkerEvent) -> list[Effect]:
    if message.job_id not in world.jobs:
        raise Unprocessable(f"an event of the unknown job {message.job_id}")
    of_worker = Event(kind=message.kind, at=message.at, source=message.worker, fields=message.fields)
    _check_shown(of_worker)
    effects: list[Effect] = [emit(message.job_id, of_worker)]
    job, worker = world.jobs.get_active(message.job_id), world.fleet.workers.get(message.worker)
    failed = (message.job_id, message.fields.get("version"))
    if message.kind == "adapter_not_shared" and worker:
        worker.unshared[message.job_id] = None if message.fields.get("lasting") else failed[1]
    if message.kind == "weights_unavailable" and worker and worker.assigned_version == failed:
        worker.unavailable = worker.assigned_version
    if message.kind == "weights_refused" and job and worker and worker.assigned_version:
        job_id, version = worker.assigned_version
        if (job_id, version) == (job.id, message.fields.get("version")):
            reason = str(message.fields.get("reason"))[:MAX_REASON_CHARS]
            job.progress.on_refused(version, worker.id, reason)
            effects.append(save_refusal(job.id, version, reason))
    return effects


def _check_shown(of_worker: Event) -> None:
    """Raise Unprocessable for an event that the REST API cannot show: it would end each stream of the job's events."""
    try:
        n_bytes = len(of_worker.model_dump_json().encode())
    except ValueError as error:
        raise Unprocessable(f"an event of {of_worker.source} with other values than JSON has: {error}") from error
    if n_bytes > MAX_EVENT_BYTES:
        raise Unprocessable(f"an event of {of_worker.source} with {n_bytes} bytes, above {MAX_EVENT_BYTES}")


def _on_worker_log(jobs: Jobs, message: WorkerLog) -> list[Effect]:
    if message.job_id not in jobs:
        return []
    lines = list(zip(message.times, message.texts, strict=False))
    return [log_lines(message.job_id, message.worker, lines)]


# --- jobs -------------------------------------------------------------------------------------------------------------


def _on_command(world: World, command: JobCommand, now: Now) -> list[Effect]:
    job = world.jobs.get(command.job_id)
    if command.action == "create":
        if job is not None:
            return []
        record = Job(command.job_id, command.job_no, _spec_in(command), created_at=now.wall)
        world.jobs.add(record)
        return [save_job(record)]
    if job is None:
        raise Unprocessable(f"{command.action} of the unknown job {command.job_id}")
    if job.record.ended:
        return []
    job.record.newest_control = command.action
    effects: list[Effect] = [save_job(job.record)]
    if command.action == "cancel":
        effects += enter_state(world, job, "cancelled", now)
    elif job.record.spec.kind == "external" and job.record.started_at is not None:
        effects += enter_state(world, job, "paused" if command.action == "pause" else "running", now)
    # The trainer service reports the state itself.
    return effects


def _spec_in(command: JobCommand) -> AnyJob:
    try:
        return parse_stored(json.loads(command.spec_json))
    except (ValueError, ConfigError) as error:
        raise Unprocessable(f"the job file of {command.job_id} cannot be parsed: {error}") from error


def _on_job_report(world: World, report: JobReport, now: Now) -> list[Effect]:
    job = world.jobs.get(report.job_id)
    if job is None:
        raise Unprocessable(f"a report on the unknown job {report.job_id}")
    job.record.trainer = report.trainer or job.record.trainer
    if report.state == "running" and job.progress.window:
        # The trainer starts in the middle of a step: its absence must not influence the length of windows.
        job.progress.window.meter = None
    return enter_state(world, job, report.state, now, report.error)


def enter_state(world: World, job: JobEntry, state: JobState, now: Now, error: str = "") -> list[Effect]:
    """Change a job's state, and that of its other models; an end ends the samples. No effect on an ended job."""
    before = job.record.state
    if not job.record.enter(state, now.wall, error):
        return []
    changed = event("job_state_changed", now, job.id, state=job.record.state, before=before, error=error)
    effects: list[Effect] = [changed]
    for served in world.jobs.models_of(job.id):
        effects += enter_state(world, served, state, now, f"job {job.id} {state}" if error else "")
    if job.record.state in ENDED:
        for sample in [s for s in world.ledger.samples.values() if s.request.job_id == job.id]:
            effects += drop(world, sample, f"job {job.record.state}")
        job.on_ended()
    return [*effects, save_job(job.record)]  # last: only keys that exist expire


def pause_without_trainer(world: World, now: Now) -> list[Effect]:
    """Pause external jobs that have been without a trainer for too long; the next request of one resumes them."""
    effects: list[Effect] = []
    for job in world.jobs.active():
        spec, progress = job.record.spec, job.progress
        if spec.kind != "external" or job.record.state != "running" or progress.trainer is not None:
            continue
        if progress.trainer_renewed_at is None or now.wall - progress.trainer_renewed_at < spec.pause_after_s:
            continue
        effects.append(
            event("trainer_missing", now, job.id, trainer=job.record.trainer, pause_after_s=spec.pause_after_s)
        )
        effects += enter_state(world, job, "paused", now)
    return effects


def _on_step_report(jobs: Jobs, report: StepReport, now: Now) -> list[Effect]:
    job = jobs.get(report.job_id)
    if job is None:
        raise Unprocessable(f"a report on the unknown job {report.job_id}")
    # The evaluation after the last step reports too, and is no training step.
    job.record.step = min(max(job.record.step, report.step + 1), job.record.spec.steps)
    # JSON has no other numbers; the run log has them all.
    metrics = {name: value for name, value in report.metrics.items() if math.isfinite(value)}
    job.record.on_metrics(report.step, metrics)
    job.record.warnings = report.warnings
    job.record.checkpointed_step = max(job.record.checkpointed_step, report.checkpointed_step)
    for one in (job, *jobs.models_of(job.id)):
        one.progress.forget_steps_before(job.record.checkpointed_step)
    return [*end_step(job, report, now), save_job(job.record), save_metrics(job.id, report.step, metrics)]
