"""Applies messages to the world. Every change may be repeated: streams are read again after a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from rlboost.services.rollout_manager.domain.effects import (
    EmitEvent,
    EmitLogLines,
    ForgetWorker,
    QuarantineMessage,
    SaveJob,
    SaveMetrics,
    SaveWorker,
)
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.domain.sample_ends import apply_closed, drop, remove_sample
from rlboost.services.rollout_manager.domain.scheduling.poison import suspected_samples
from rlboost.services.rollout_manager.domain.seeding.window import Window
from rlboost.services.rollout_manager.domain.step_windows import credit_generation, end_step
from rlboost.services.rollout_manager.domain.token_log.ledger import FrameOutcome
from rlboost.services.rollout_manager.domain.worker_removal import on_worker_left
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.errors import ConfigError, Unprocessable
from rlboost.shared.ids import is_served, job_of
from rlboost.shared.job.spec import JobSpec, parse_stored
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
    StepReport,
    TokenFrame,
    TurnAnswered,
    WeightsCommitted,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLog,
)
from rlboost.shared.wire.columns import U64, ints


def apply_message(world: World, message: Message, entry_id: str, now: Now) -> None:  # noqa: C901, PLR0912 - one flat table
    """Apply a message that is new to this manager.

    Raises:
        Unprocessable: the message is invalid; the caller appends it to the dead letters.

    """
    match message:
        case TokenFrame() | SampleFailed() | Admitted() | Placed() | Closed() | Restated():
            apply_record(world, message, entry_id, counted=True)
        case GroupRequested():
            _on_group_requested(world, message)
        case WorkerHeartbeat():
            _on_heartbeat(world, message, now)
        case WorkerJoined():
            _on_joined(world, message, now)
        case PreemptionNotice():
            _on_notice(world, message, now)
        case WorkerLeft():
            _on_left(world, message, now)
        case WorkerEvent():
            _on_worker_event(world, message)
        case WorkerLog():
            _on_worker_log(world, message)
        case WeightsCommitted():
            _on_committed(world, message)
        case JobCommand() | JobReport() | StepReport() if message.job_id in world.quarantined:
            world.outbox.add(QuarantineMessage(message.job_id, message))
        case JobCommand():
            _on_command(world, message, now)
        case JobReport():
            _on_job_report(world, message, now)
        case StepReport():
            _on_step_report(world, message, now)
        case _:
            raise Unprocessable(f"a {message.tag} does not belong in this stream")


# --- the token log ----------------------------------------------------------------------------------------------------


def apply_record(world: World, message: Message, entry_id: str, *, counted: bool) -> None:
    """Apply a record of the token log.

    `counted` is false for records that the stored audit covers already. The manager's own records were audited when
    they were decided, except for tokens that a placement cuts and that had not been read by then.
    """
    match message:
        case TokenFrame():
            apply_frames(world, [message], counted=counted)
        case SampleFailed():
            world.ledger.fail(message)
        case Admitted():
            _apply_admitted(world, message.request, entry_id)
        case Placed():
            _apply_placed(world, message, counted=counted)
        case Closed():
            apply_closed(world, ints(message.samples, U64))
        case Restated():
            _apply_restated(world, message, entry_id)
        case _:
            raise Unprocessable(f"a {message.tag} does not belong in the token log")


def apply_frames(world: World, frames: Sequence[TokenFrame], *, counted: bool = True) -> None:
    """Apply consecutive frames of the log at once.

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
    for sample_id in dict.fromkeys(gaps):
        world.revoke(world.ledger.samples[sample_id])
    for sample_id in dict.fromkeys([*gaps, *outcome.released]):
        world.unassign(world.ledger.samples[sample_id])
    if counted:
        world.audit_frames(outcome)


def _apply_admitted(world: World, request: GroupRequested, entry_id: str) -> None:
    first = world.ledger.samples.get(request.group)
    if first is not None and not first.first_id:
        # The record of an admission that this manager decided itself: now its log entry is known.
        world.ledger.set_admission_entry(request, entry_id)
        return
    if not world.may_have_samples(request.job_id):
        return
    progress = world.progress.get(request.job_id)
    added = world.ledger.admit(request, entry_id)
    done = [sample.id for sample in added if progress and progress.is_delivered(sample.id)]
    world.on_admitted(added)
    for sample_id in done:
        remove_sample(world, sample_id)


def _apply_placed(world: World, message: Placed, *, counted: bool) -> None:
    for sample, cut in world.ledger.place(message):
        if counted and cut and (audit := world.audit_of(job_of(sample.id))):
            audit.tokens_regenerated["late"] += cut


def _apply_restated(world: World, message: Restated, entry_id: str) -> None:
    known = message.sample in world.ledger.samples
    progress = world.progress.get(message.request.job_id)
    if not known and progress and progress.is_delivered(message.sample):
        return  # closed after this was written
    if not world.may_have_samples(message.request.job_id):
        return
    world.ledger.restate(message, entry_id)
    if not known:
        world.on_admitted([world.ledger.samples[message.sample]])


# --- requests ---------------------------------------------------------------------------------------------------------


def _on_group_requested(world: World, request: GroupRequested) -> None:
    job = world.jobs.get(request.job_id)
    if job is None:
        raise Unprocessable(f"group {request.group} of the unknown job {request.job_id}")
    if job_of(request.group) != job.no:
        raise Unprocessable(
            f"group {request.group} is of job number {job_of(request.group)}, but {request.job_id} is {job.no}"
        )
    if job.ended or world.is_known(request):
        return
    world.on_admitted(world.ledger.admit(request, ""))
    audit = world.audits[job.id]
    (audit.serving if is_served(request.group) else audit).requested += request.n
    world.outbox.record(Admitted(request=request))


def _on_committed(world: World, message: WeightsCommitted) -> None:
    job = world.jobs.get(message.job_id)
    if job is not None and not job.ended:
        progress = world.progress[job.id]
        progress.committed_version = max(message.version, progress.committed_version)


def apply_delivered(world: World, job_id: str, message: Message) -> None:
    """Rebuild, after a restart, what `rollouts.finished` shows to have been delivered."""
    progress = world.progress[job_id]
    match message:
        case SampleFinished() | SampleDropped():
            progress.on_delivered(message.sample)
        case SeedingEnded():
            progress.window = Window(message.step, message.window_s, "ended", lasted_s=message.window_s)
        case SeedingReopened():
            if progress.window:
                progress.window.phase, progress.window.reopened = "open", True
        case GroupOpened() | TurnAnswered():
            pass  # notes of the trainer for its own restart
        case _:
            raise Unprocessable(f"a {message.tag} does not belong among finished samples")


# --- workers ----------------------------------------------------------------------------------------------------------


def _on_joined(world: World, message: WorkerJoined, now: Now) -> None:
    if (worker := world.fleet.join(message, now.mono)) is not None:
        worker.unbilled_startup_s = message.startup_s
        world.outbox.add(SaveWorker(message))
        world.emit_event("worker_joined", now, worker=message.worker, role=message.role, worker_kind=message.kind)


def _on_heartbeat(world: World, heartbeat: WorkerHeartbeat, now: Now) -> None:
    worker = world.fleet.workers.get(heartbeat.worker)
    if worker is None:
        # It was unreachable until its dismissal expired: dismissed again, it joins as a new incarnation.
        world.outbox.add(ForgetWorker(heartbeat.worker))
        return
    credit_generation(world, worker, now)
    block_tokens = worker.kv.block_tokens
    before = world.fleet.on_heartbeat(worker, heartbeat, now.mono)
    if worker.kv.block_tokens != block_tokens:
        worker.set_samples(world.ledger.samples[i] for i in worker.samples)
    world.update_batch_cap(worker)
    if heartbeat.last_command and worker.assigned_version and worker.state != "draining":
        worker.command_check.observe(
            world.command_digest(worker), heartbeat.command_digest, heartbeat.last_command, now.mono
        )
    if before is None:
        return
    role, job_id = worker.joined.role, worker.job
    world.emit_event("worker_state", now, worker=worker.id, role=role, job_id=job_id, state=worker.state, before=before)
    if worker.state == "suspended":
        # It flushed before it reported the state: all its tokens are in the ledger.
        world.unassign_all(worker, now, "suspended")


def _on_notice(world: World, notice: PreemptionNotice, now: Now) -> None:
    worker = world.fleet.workers.get(notice.worker)
    if worker is not None and not worker.noticed:
        world.fleet.on_notice(worker)
        world.emit_event(
            "worker_notice", now, worker=worker.id, job_id=worker.job, reason=notice.reason, lead_s=notice.lead_s
        )


def _on_left(world: World, left: WorkerLeft, now: Now) -> None:
    worker = world.fleet.workers.get(left.worker)
    if worker is not None:
        running_at_failure = ints(left.running_at_failure, U64)
        if worker.noticed:
            running_at_failure = []  # a preemption: no sample is to blame
        running = [world.ledger.samples[i] for i in running_at_failure if i in worker.samples]
        on_worker_left(world, worker, now, left.reason)
        for sample in suspected_samples(running):
            # A record of the log: every replay counts it as this manager does.
            reason = "the engine of its worker died or hung"
            failed = SampleFailed(worker=worker.id, sample=sample.id, attempt=sample.attempt, reason=reason)
            if world.ledger.fail(failed):
                world.outbox.record(failed)


def _on_worker_event(world: World, message: WorkerEvent) -> None:
    if message.job_id not in world.jobs and message.job_id not in world.quarantined:
        raise Unprocessable(f"an event of the unknown job {message.job_id}")
    event = Event(kind=message.kind, at=message.at, source=message.worker, fields=message.fields)
    world.outbox.add(EmitEvent(message.job_id, event))


def _on_worker_log(world: World, message: WorkerLog) -> None:
    if message.job_id in world.jobs:
        lines = list(zip(message.times, message.texts, strict=False))
        world.outbox.add(EmitLogLines(message.job_id, message.worker, lines))


# --- jobs -------------------------------------------------------------------------------------------------------------


def _on_command(world: World, command: JobCommand, now: Now) -> None:
    job = world.jobs.get(command.job_id)
    if command.action == "create":
        if job is None:
            job = Job(command.job_id, command.job_no, _spec_in(command), created_at=now.wall)
            world.jobs.add(job)
            world.outbox.add(SaveJob(job))
        return
    if job is None:
        raise Unprocessable(f"{command.action} of the unknown job {command.job_id}")
    if command.action == "cancel":  # after a pause or a resume, the trainer reports the state
        _enter(world, job, "cancelled", now, "")


def _spec_in(command: JobCommand) -> JobSpec:
    try:
        return parse_stored(json.loads(command.spec_json))
    except (ValueError, ConfigError) as error:
        raise Unprocessable(f"the job file of {command.job_id} cannot be parsed: {error}") from error


def _on_job_report(world: World, report: JobReport, now: Now) -> None:
    job = world.jobs.get(report.job_id)
    if job is None:
        raise Unprocessable(f"a report on the unknown job {report.job_id}")
    job.trainer = report.trainer or job.trainer
    if report.state == "running" and (progress := world.progress.get(job.id)) and progress.window:
        # The trainer starts in the middle of a step: its absence must not influence the length of windows.
        progress.window.meter = None
    _enter(world, job, report.state, now, report.error)


def _enter(world: World, job: Job, state: JobState, now: Now, error: str) -> None:
    before = job.state
    if not job.enter(state, now.wall, error):
        return
    world.emit_event("job_state_changed", now, job.id, state=job.state, before=before, error=error)
    world.outbox.add(SaveJob(job))
    if job.state in ENDED:
        for sample in [s for s in world.ledger.samples.values() if s.request.job_id == job.id]:
            drop(world, sample, f"job {job.state}")
        world.jobs.drop_progress(job.id)


def _on_step_report(world: World, report: StepReport, now: Now) -> None:
    job = world.jobs.get(report.job_id)
    if job is None:
        raise Unprocessable(f"a report on the unknown job {report.job_id}")
    # The evaluation after the last step reports too, and is no training step.
    job.step = min(max(job.step, report.step + 1), job.spec.steps)
    # JSON has no other numbers; the run log has them all.
    metrics = {name: value for name, value in report.metrics.items() if math.isfinite(value)}
    job.on_metrics(report.step, metrics)
    job.warnings = report.warnings
    job.checkpointed_step = max(job.checkpointed_step, report.checkpointed_step)
    if progress := world.progress.get(job.id):
        progress.forget_steps_before(job.checkpointed_step)
    end_step(world, job, report, now)
    world.outbox.add(SaveJob(job))
    world.outbox.add(SaveMetrics(job.id, report.step, metrics))
