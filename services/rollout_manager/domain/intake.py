"""What each message changes in the world. Every change may be repeated: streams are read again after a crash."""

from __future__ import annotations

import json
from collections.abc import Sequence

from services.rollout_manager.domain.actions import ForgetWorker, Keep, Record, SaveJob, SaveMetrics, SaveWorker
from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.jobs import ENDED, Job
from services.rollout_manager.domain.ledger import Outcome
from services.rollout_manager.domain.needs import revoke
from services.rollout_manager.domain.seeding import Window
from services.rollout_manager.domain.steps import end_step
from services.rollout_manager.domain.trials import suspects
from services.rollout_manager.domain.world import Now, World
from shared.columns import U64, ints
from shared.errors import Bury, ConfigError
from shared.ids import SampleId, is_served, job_of
from shared.jobspec import JobSpec, recalled
from shared.messages import (
    Admitted,
    Closed,
    GroupOpened,
    GroupRequested,
    JobCommand,
    JobReport,
    JobState,
    Message,
    Placed,
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
    WorkerBeat,
    WorkerJoined,
    WorkerLeft,
    WorkerNotice,
)


def take(world: World, message: Message, entry_id: str, now: Now) -> None:  # noqa: C901 - one flat table
    """Apply a message that is new to this manager.

    Raises:
        Bury: the message makes no sense; the caller puts it among the dead letters.

    """
    match message:
        case TokenFrame() | SampleFailed() | Admitted() | Placed() | Closed() | Restated():
            fold(world, message, entry_id, counted=True)
        case GroupRequested():
            _request(world, message)
        case WorkerBeat():
            _beat(world, message, now)
        case WorkerJoined():
            _join(world, message, now)
        case WorkerNotice():
            _notice(world, message, now)
        case WorkerLeft():
            _leave(world, message, now)
        case WeightsCommitted():
            _committed(world, message)
        case JobCommand() | JobReport() | StepReport() if message.job_id in world.aside:
            world.actions.append(Keep(message.job_id, message))
        case JobCommand():
            _command(world, message, now)
        case JobReport():
            _job_report(world, message, now)
        case StepReport():
            _step_report(world, message, now)
        case _:
            raise Bury(f"a {message.tag} does not belong in this stream")


# --- the token log ----------------------------------------------------------------------------------------------------


def fold(world: World, message: Message, entry_id: str, *, counted: bool) -> None:
    """Apply a record of the token log.

    `counted` is false for records whose part in the audit was stored already. What the manager's own records mean for
    the audit was stored with them, except tokens that a placement cuts and that nobody had read when it was decided.
    """
    match message:
        case TokenFrame():
            take_frames(world, [message], counted=counted)
        case SampleFailed():
            world.ledger.fail(message)
        case Admitted():
            _admit(world, message.request, entry_id)
        case Placed():
            _place(world, message, counted=counted)
        case Closed():
            closed = ints(message.samples, U64)
            world.close(closed)
            world.forget_served(closed)
        case Restated():
            _restate(world, message, entry_id)
        case _:
            raise Bury(f"a {message.tag} does not belong in the token log")


def take_frames(world: World, frames: Sequence[TokenFrame], *, counted: bool = True) -> None:
    """Apply frames that stand one behind the other in the log, at once.

    Raises:
        Bury: one of them makes no sense, and nothing was changed: give them one by one to know which.

    """
    outcome = world.ledger.extend(*frames)
    for sample_id in outcome.gaps:
        # Tokens are missing between the ledger and this frame: the owner's later frames cannot be used either.
        sample = world.ledger.samples[sample_id]
        owner = world.fleet.workers.get(sample.worker)
        if owner is not None:
            world.send(owner, revoke(sample))
            world.orphan(sample)
    for sample_id in outcome.released:
        world.orphan(world.ledger.samples[sample_id])
    if counted:
        _count(world, outcome)


def _count(world: World, outcome: Outcome) -> None:
    for job_no, tokens in outcome.accepted.items():
        if audit := world.audit_of(job_no):
            audit.tokens_generated += tokens
    for job_no, cause, tokens in outcome.refused:
        if audit := world.audit_of(job_no):
            audit.tokens_generated += tokens
            audit.tokens_made_again[cause] += tokens
    for job_no, rows in outcome.duplicates.items():
        if audit := world.audit_of(job_no):
            audit.duplicates += rows


def _admit(world: World, request: GroupRequested, entry_id: str) -> None:
    first = world.ledger.samples.get(request.group)
    if first is not None and not first.first_id:
        # The record of an admission that this manager has decided itself: now its place in the log is known.
        world.ledger.recorded(request, entry_id)
        return
    done = world.delivered[request.job_id].get(SampleId.unpack(request.group).step, set())
    added = world.ledger.admit(request, entry_id)
    world.admitted(added)
    world.close([sample.id for sample in added if sample.id in done])


def _place(world: World, message: Placed, *, counted: bool) -> None:
    for sample, cut in world.ledger.place(message):
        if counted and cut and (audit := world.audit_of(job_of(sample.id))):
            audit.tokens_made_again["late"] += cut


def _restate(world: World, message: Restated, entry_id: str) -> None:
    known = message.sample in world.ledger.samples
    step = SampleId.unpack(message.sample).step
    if not known and message.sample in world.delivered[message.request.job_id].get(step, ()):
        return  # closed after this was written
    world.ledger.restate(message, entry_id)
    if not known:
        world.admitted([world.ledger.samples[message.sample]])


# --- requests ---------------------------------------------------------------------------------------------------------


def _request(world: World, request: GroupRequested) -> None:
    job = world.jobs.get(request.job_id)
    if job is None:
        raise Bury(f"group {request.group} of the unknown job {request.job_id}")
    if job_of(request.group) != job.no:
        raise Bury(f"group {request.group} is of job number {job_of(request.group)}, but {request.job_id} is {job.no}")
    if job.ended or world.is_known(request):
        return
    world.admitted(world.ledger.admit(request, ""))
    audit = world.audits[job.id]
    (audit.serving if is_served(request.group) else audit).requested += request.n
    world.actions.append(Record(Admitted(request=request)))


def _committed(world: World, message: WeightsCommitted) -> None:
    job = world.jobs.get(message.job_id)
    if job is not None and not job.ended:
        world.committed[job.id] = max(message.version, world.committed.get(job.id, -1))
        world.restless = True


def recall_delivered(world: World, job_id: str, message: Message) -> None:
    """Remember, after a restart, what `rollouts.finished` shows to have been delivered."""
    match message:
        case SampleFinished() | SampleDropped():
            world.note_delivered(job_id, message.sample)
        case SeedingEnded():
            window = Window(message.step, message.window_s, "ended", lasted_s=message.window_s)
            world.windows[job_id] = window
        case SeedingReopened():
            if job_id in world.windows:
                world.windows[job_id].phase, world.windows[job_id].reopened = "open", True
        case GroupOpened() | TurnAnswered():
            pass  # notes of the trainer, for its successor
        case _:
            raise Bury(f"a {message.tag} does not belong among finished samples")


# --- workers ----------------------------------------------------------------------------------------------------------


def _join(world: World, message: WorkerJoined, now: Now) -> None:
    if world.fleet.join(message, now.mono) is not None:
        world.restless = True
        world.actions.append(SaveWorker(message))
        world.tell("worker_joined", now, worker=message.worker, role=message.role, worker_kind=message.kind)


def _beat(world: World, beat: WorkerBeat, now: Now) -> None:
    worker = world.fleet.workers.get(beat.worker)
    if worker is None:
        # Cut off for so long that its dismissal has expired: it is told again, and joins anew.
        world.actions.append(ForgetWorker(beat.worker))
        return
    serves, before = (worker.job_id, worker.version, worker.known), world.fleet.hear(worker, beat, now.mono)
    world.resize(worker)
    if serves != (worker.job_id, worker.version, worker.known):
        world.restless = True
    if before is None:
        return
    world.restless = True
    world.tell("worker_state", now, worker=worker.id, role=worker.joined.role, state=worker.state, before=before)
    if worker.state == "suspended":
        # It flushed before it said so: everything it made is in the ledger.
        world.orphan_all(worker, now, "suspended")


def _notice(world: World, notice: WorkerNotice, now: Now) -> None:
    worker = world.fleet.workers.get(notice.worker)
    if worker is not None and not worker.noticed:
        worker.noticed, worker.state = True, "draining"
        world.changed(worker)
        world.restless = True
        world.tell("worker_notice", now, worker=worker.id, reason=notice.reason, lead_s=notice.lead_s)


def _leave(world: World, left: WorkerLeft, now: Now) -> None:
    worker = world.fleet.workers.get(left.worker)
    if worker is not None:
        died_with = ints(left.died_with, U64)
        if worker.noticed:
            _count_preemption(world, worker, "with_notice")
            died_with = []  # it was on its way out: nobody's fault
        had = [world.ledger.samples[i] for i in died_with if i in worker.samples]
        remove_worker(world, worker, now, lost=False, reason=left.reason)
        for sample in suspects(had):
            # A record like any other: whoever folds the log counts it as this manager does.
            reason = "the engine of its worker died or hung"
            failed = SampleFailed(worker=worker.id, sample=sample.id, attempt=sample.attempt, reason=reason)
            if world.ledger.fail(failed):
                world.record(failed)


def lose_worker(world: World, worker: Worker, now: Now) -> None:
    """Declare a worker dead: neither its lease nor a beat of it is there."""
    _count_preemption(world, worker, "with_notice" if worker.noticed else "without_notice")
    remove_worker(world, worker, now, lost=True, reason="its lease ran out")


def remove_worker(world: World, worker: Worker, now: Now, *, lost: bool, reason: str) -> None:
    """Forget a worker; its samples wait for another."""
    world.orphan_all(worker, now, "lost" if lost else "left")
    world.fleet.remove(worker, "lost" if lost else "left")
    world.changed(worker)
    world.restless = True
    world.actions.append(ForgetWorker(worker.id))
    world.tell("worker_lost" if lost else "worker_left", now, worker=worker.id, reason=reason)


def _count_preemption(world: World, worker: Worker, kind: str) -> None:
    for job in world.active_jobs():
        if job.state in {"running", "paused"} and worker.job in {job.id, ""}:
            world.audits[job.id].preemptions[kind] += 1


# --- jobs -------------------------------------------------------------------------------------------------------------


def _command(world: World, command: JobCommand, now: Now) -> None:
    job = world.jobs.get(command.job_id)
    if command.action == "create":
        if job is None:
            spec = _spec_in(command)
            job = Job(command.job_id, command.job_no, spec, created_at=now.wall)
            world.add_job(job)
            world.actions.append(SaveJob(job))
        return
    if job is None:
        raise Bury(f"{command.action} of the unknown job {command.job_id}")
    if command.action == "cancel":
        _enter(world, job, "cancelled", now, "")


def _spec_in(command: JobCommand) -> JobSpec:
    try:
        return recalled(json.loads(command.spec_json))
    except (ValueError, ConfigError) as error:
        raise Bury(f"the job file of {command.job_id} cannot be read: {error}") from error


def _job_report(world: World, report: JobReport, now: Now) -> None:
    job = world.jobs.get(report.job_id)
    if job is None:
        raise Bury(f"a report on the unknown job {report.job_id}")
    job.trainer = report.trainer or job.trainer
    if report.state == "running" and (window := world.windows.get(job.id)) is not None:
        # A trainer that begins in the middle of a step: its absence says nothing of how long windows should be.
        window.meter = None
    world.restless = True
    _enter(world, job, report.state, now, report.error)


def _enter(world: World, job: Job, state: JobState, now: Now, error: str) -> None:
    before = job.state
    if not job.enter(state, now.wall, error):
        return
    world.tell("job_state", now, job.id, state=job.state, before=before, error=error)
    world.actions.append(SaveJob(job))
    if job.state in ENDED:
        for sample in [s for s in world.ledger.samples.values() if s.request.job_id == job.id]:
            world.drop(sample, f"job {job.state}")
        world.end_job(job)


def _step_report(world: World, report: StepReport, now: Now) -> None:
    job = world.jobs.get(report.job_id)
    if job is None:
        raise Bury(f"a report on the unknown job {report.job_id}")
    job.step = min(max(job.step, report.step + 1), job.spec.steps)  # the last evaluation reports no step of training
    job.note(report.step, report.metrics)
    job.checkpointed_step = max(job.checkpointed_step, report.checkpointed_step)
    for step in [step for step in world.delivered[job.id] if step < job.checkpointed_step]:
        del world.delivered[job.id][step]
    end_step(world, job, report, now)
    world.actions += [SaveJob(job), SaveMetrics(job.id, report.step, report.metrics)]
