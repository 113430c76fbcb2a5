"""What a job does, and what it waits for: its trainer's own wait, a missing trainer, or a worker for its samples."""

from __future__ import annotations

from typing import Any

from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import JobEntry, JobProgress, Jobs
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.services.rollout_manager.domain.world import refusal_of
from rlboost.shared.job.base import ServedJob
from rlboost.shared.messages import TrainerStatus, Wait, public_wait

TRAINER_SILENCE_S = 3.0
"""A trainer that has not renewed its lease for this time counts as missing; it renews every second."""
LONG_TURN_S = 2.0
"""A turn of the manager that takes longer waits for Redis."""
OVERDUE_S = 300.0
"""A job's wait for a trainer or a worker is reported after this time; the manager does not end it."""
SILENT_S = 10.0
"""A worker that has samples and has sent no token for this time is named."""
FEW_SAMPLES = 8
"""When no more samples are in flight, the workers that have them are named."""


def job_wait_status(jobs: Jobs, fleet: Fleet, job: JobEntry) -> dict[str, Any] | None:
    """Return `{for, because, since, limit_s, kind}` (Unix seconds), or None if the job waits for nothing."""
    if job.record.ended:
        return None
    if job.record.state == "pending":
        return _wait_of_pending(jobs, job)
    progress = job.progress
    if progress.trainer_renewed_at is None:
        return None  # this manager has not read the trainer's lease yet
    if (trainer := _present_trainer(job)) is None and not job.served_for:
        if job.record.spec.kind == "external":
            because = "none is attached: start it again, or end the job with 'rlboost cancel'"
        else:
            because = "it does not renew its lease on this job: it died, cannot reach Redis, or cannot read the job: "
            because += "look at its log"
        return public_wait("the trainer", because, progress.trainer_renewed_at, kind="trainer")
    if progress.stalled_since_unix_s is not None:
        refused = refusal_of(fleet, job, progress.committed_version)
        because = f"samples are queued and no worker can take them: {refused or _why_none(fleet)}"
        if job.audit.cost.budget_reached:
            limit = job.record.spec.elastic.max_dollars
            because = (
                f"its budget (elastic.max_dollars: {limit:g}) pays for no more spot workers: "
                "add reserved workers, or cancel it and continue from its model in another job"
            )
        limit_s = _limit_of_stall(trainer.waiting if trainer else None, progress.stalled_since_unix_s)
        subject = "a worker that is ready with this job's weights"
        return public_wait(subject, because, progress.stalled_since_unix_s, limit_s, kind="worker")
    return _trainers_wait(fleet, job, trainer.waiting) if trainer and trainer.waiting else None


def overdue_waits(jobs: Jobs, fleet: Fleet, now: Now) -> list[tuple[str, dict[str, Any]]]:
    """Return the jobs that wait too long for a trainer or a worker, each wait once."""
    reported = []
    active = jobs.active()
    are_trainers_held = any(job.record.state != "pending" for job in active)
    for job in active:
        progress = job.progress
        if job.record.state == "pending" and (
            are_trainers_held or not _is_overdue(progress, job.record.created_at, now)
        ):
            continue  # also saves describing the wait of each of many queued jobs
        wait = job_wait_status(jobs, fleet, job)
        if wait is None or wait.get("kind") not in {"trainer", "worker"}:
            continue
        if not _is_overdue(progress, wait["since"], now):
            continue
        progress.reported_wait_since = wait["since"]
        reported.append((job.id, wait))
    return reported


def _is_overdue(progress: JobProgress, since: float, now: Now) -> bool:
    return now.wall - since > OVERDUE_S and since != progress.reported_wait_since


def job_phase(job: JobEntry) -> dict[str, Any] | None:
    """Return what the trainer does, None while none holds the job.

    Its fields are `name`; `step`, from 0; `since` (Unix seconds); and `last_s`, how long it took in the last step, None
    where that is not measured.
    """
    if job.record.ended or (status := _present_trainer(job)) is None:
        return None
    name, step = status.phase, status.step
    latest = job.record.latest if step >= job.record.step else {}  # the step has just ended: these are its own metrics
    return {"name": name, "step": step, "since": status.phase_since, "last_s": _last_duration_s(name, latest)}


def _present_trainer(job: JobEntry) -> TrainerStatus | None:
    """Return the status of the trainer that holds the job and renews its lease, an external one at its own pace."""
    progress = job.progress
    if progress.trainer is None or progress.trainer_renewed_at is None or job.record.spec.kind == "external":
        return progress.trainer
    is_renewed = progress.trainer_checked_at - progress.trainer_renewed_at <= TRAINER_SILENCE_S
    return progress.trainer if is_renewed else None


def _last_duration_s(phase: str, latest: dict[str, float]) -> float | None:
    """Return how long a phase took in the step with these metrics; training includes generation and waits."""
    publish_s = latest.get("time/publish_s", 0.0)
    match phase:
        case "training" if "time/step_s" in latest:
            return latest["time/step_s"] - publish_s
        case "publishing" if publish_s:
            return publish_s
    return None


def redis_wait(turn_began_at: float | None, now: float) -> dict[str, Any] | None:
    """Return the wait of every job while Redis does not answer the manager, None while it does; Unix seconds."""
    if turn_began_at is None or now - turn_began_at <= LONG_TURN_S:
        return None
    because = "it does not answer the manager: check its machine, disk and network"
    return public_wait("Redis", because, turn_began_at, kind="redis")


def _trainers_wait(fleet: Fleet, job: JobEntry, wait: Wait) -> dict[str, Any]:
    public = wait.public()
    if holders := [worker for worker in fleet.workers.values() if worker.n_samples_of(job.id)]:
        public["because"] += f"; in flight: {_in_flight(holders)}"
    return public


def _in_flight(holders: list[Worker]) -> str:
    """Return how many samples these workers have, and how fast they generate."""
    n_samples = sum(len(one.samples) for one in holders)
    silent = [one for one in holders if one.trust.silent_s >= SILENT_S]
    if n_samples <= FEW_SAMPLES or len(silent) == len(holders) <= FEW_SAMPLES:
        return ", ".join(f"{len(one.samples)} on {one.id} ({_pace(one)})" for one in holders)
    workers = f"{len(holders)} worker" + "s" * (len(holders) > 1)
    text = f"{n_samples:,} on {workers} ({sum(one.tokens_per_s for one in holders):,.0f} tokens/s)"
    return "; ".join([text, *(f"{len(one.samples)} on {one.id}: {_pace(one)}" for one in silent[:FEW_SAMPLES])])


def _pace(worker: Worker) -> str:
    silent_s = worker.trust.silent_s
    return f"no token for {silent_s:.0f} s" if silent_s >= SILENT_S else f"{worker.tokens_per_s:.0f} tokens/s"


def _limit_of_stall(trainers: Wait | None, since: float) -> float | None:
    """Return how long after `since` the trainer fails the job for lack of samples; None if it waits for none."""
    if trainers is None or trainers.kind != "samples":
        return None
    return trainers.since + trainers.limit_s - since


def _wait_of_pending(jobs: Jobs, pending: JobEntry) -> dict[str, Any]:
    """Return the wait of a pending job: for a resume, or for the jobs that hold the trainers, by state."""
    if pending.record.newest_control == "pause":
        return public_wait("a resume", "the job was paused before a trainer took it", pending.record.created_at)
    if pending.record.spec.kind == "external":
        return public_wait("its trainer", "none has attached yet", pending.record.created_at, kind="trainer")
    if isinstance(pending.record.spec, ServedJob):
        return public_wait("its job", f"a trainer takes {pending.served_for} first", pending.record.created_at)
    holders = [job for job in jobs.active() if job.record.state != "pending" and not job.served_for]
    if not holders:
        because = f"no trainer has taken it: check 'rlboost ps'; 'rlboost logs {pending.id}' shows if none can read it"
        return public_wait("a trainer to take the job", because, pending.record.created_at, kind="trainer")
    held_by = ", ".join(f"{job.id} ({job.record.state})" for job in holders)
    trainers = "the trainer, which holds" if len(holders) == 1 else "a trainer; they hold"
    because = "a trainer runs one job at a time"
    if paused := next((job.id for job in holders if job.record.state == "paused"), None):
        because += f": 'rlboost resume {paused}' continues that job, 'rlboost cancel {paused}' ends it"
    return public_wait(f"{trainers} {held_by}", because, pending.record.created_at, kind="trainer")


def _why_none(fleet: Fleet) -> str:
    """Return why no worker can take samples: their states, and what the one that waits longest waits for."""
    workers = list(fleet.workers.values())
    if not workers:
        last = next(reversed(fleet.gone.values()), None)
        how = "was lost" if last and last.state == "lost" else "left"
        gone = f" ({last.id} {how}: {last.gone_reason})" if last else ""
        return f"there is no worker{gone}; start one with 'rlboost worker join'"
    states = ["yielding to the serving engine beside it" if worker.yields else worker.state for worker in workers]
    counted = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    waits = [(worker.waiting, worker) for worker in workers if worker.waiting]
    oldest = min(waits, key=lambda found: found[0].since, default=None)
    return counted + (f"; {oldest[1].id} waits for {oldest[0].subject} ({oldest[0].because})" if oldest else "")
