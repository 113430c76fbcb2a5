"""What a job does, and what it waits for: its trainer's own wait, a missing trainer, or a worker for its samples."""

from __future__ import annotations

from typing import Any

from rlboost.services.rollout_manager.domain.jobs.progress import JobProgress
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.domain.workers.fleet import Fleet
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages import TrainerStatus, Wait, public_wait

TRAINER_SILENCE_S = 3.0
"""A trainer that has not renewed its lease for this time counts as missing; it renews every second."""
LONG_TURN_S = 2.0
"""A turn of the manager that takes longer waits for Redis."""
OVERDUE_S = 300.0
"""A job's wait for a trainer or a worker is reported after this time; the manager does not end it."""
FEW_SAMPLES = 8
"""When no more samples are in flight, the workers that have them are named."""


def job_wait_status(world: World, job: Job) -> dict[str, Any] | None:
    """Return `{for, because, since, limit_s, kind}` (Unix seconds), or None if the job waits for nothing."""
    if job.ended:
        return None
    if job.state == "pending":
        return public_wait(*_trainer_of_pending(world, job), job.created_at, kind="trainer")
    progress = world.progress.get(job.id)
    if progress is None or progress.trainer_renewed_at is None:
        return None  # this manager has not read the trainer's lease yet
    if (trainer := _present_trainer(progress)) is None:
        because = "it does not renew its lease on this job: it died, cannot reach Redis, or cannot read the job: "
        return public_wait("the trainer", because + "look at its log", progress.trainer_renewed_at, kind="trainer")
    if progress.stalled_since_unix_s is not None:
        because = f"samples are queued and no worker can take them: {_why_none(world.fleet)}"
        if world.audits[job.id].cost.budget_reached:
            because = (
                f"its budget (elastic.max_dollars: {job.spec.elastic.max_dollars:g}) pays for no more spot workers: "
                "add reserved workers, or cancel it and continue from its model in another job"
            )
        limit_s = _limit_of_stall(trainer.waiting, progress.stalled_since_unix_s)
        subject = "a worker that is ready with this job's weights"
        return public_wait(subject, because, progress.stalled_since_unix_s, limit_s, kind="worker")
    return _trainers_wait(world.fleet, job, trainer.waiting) if trainer.waiting else None


def report_overdue(world: World, now: Now) -> list[tuple[str, dict[str, Any]]]:
    """Emit an event for each wait for a trainer or a worker that lasts too long, once; return these jobs and waits."""
    reported = []
    active = world.jobs.active()
    are_trainers_held = any(job.state != "pending" for job in active)
    for job in active:
        progress = world.progress[job.id]
        if job.state == "pending" and (are_trainers_held or not _is_overdue(progress, job.created_at, now)):
            continue  # also saves describing the wait of each of many queued jobs
        wait = job_wait_status(world, job)
        if wait is None or wait.get("kind") not in {"trainer", "worker"}:
            continue
        if not _is_overdue(progress, wait["since"], now):
            continue
        progress.reported_wait_since = wait["since"]
        subject, because = wait["for"], wait["because"]
        world.emit_event("wait_limit_exceeded", now, job.id, subject=subject, because=because, limit_s=OVERDUE_S)
        reported.append((job.id, wait))
    return reported


def _is_overdue(progress: JobProgress, since: float, now: Now) -> bool:
    return now.wall - since > OVERDUE_S and since != progress.reported_wait_since


def job_phase(world: World, job: Job) -> dict[str, Any] | None:
    """Return what the trainer does, None while none holds the job.

    Its fields are `name`; `step`, from 0; `since` (Unix seconds); and `last_s`, how long it took in the last step, None
    where that is not measured.
    """
    progress = world.progress.get(job.id)
    if job.ended or progress is None or (status := _present_trainer(progress)) is None:
        return None
    name, step = status.phase, status.step
    latest = job.latest if step >= job.step else {}  # the step has just ended: these are its own metrics
    return {"name": name, "step": step, "since": status.phase_since, "last_s": _last_duration_s(name, latest)}


def _present_trainer(progress: JobProgress) -> TrainerStatus | None:
    """Return the status of the trainer that holds the job and renews its lease."""
    if progress.trainer is None or progress.trainer_renewed_at is None:
        return None
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


def _trainers_wait(fleet: Fleet, job: Job, wait: Wait) -> dict[str, Any]:
    public = wait.public()
    if holders := [worker for worker in fleet.workers.values() if worker.samples and worker.job == job.id]:
        public["because"] += f"; in flight: {_in_flight(holders)}"
    return public


def _in_flight(holders: list[Worker]) -> str:
    """Return how many samples these workers have, and how fast they generate."""
    n_samples = sum(len(one.samples) for one in holders)
    if n_samples <= FEW_SAMPLES:
        return ", ".join(f"{len(one.samples)} on {one.id} ({one.tokens_per_s:.0f} tokens/s)" for one in holders)
    workers = f"{len(holders)} worker" + "s" * (len(holders) > 1)
    return f"{n_samples:,} on {workers} ({sum(one.tokens_per_s for one in holders):,.0f} tokens/s)"


def _limit_of_stall(trainers: Wait | None, since: float) -> float | None:
    """Return how long after `since` the trainer fails the job for lack of samples; None if it waits for none."""
    if trainers is None or trainers.kind != "samples":
        return None
    return trainers.since + trainers.limit_s - since


def _trainer_of_pending(world: World, pending: Job) -> tuple[str, str]:
    """Return what a pending job waits for and why: the jobs that hold the trainers, by state."""
    holders = [job for job in world.jobs.active() if job.state != "pending"]
    if not holders:
        because = f"no trainer has taken it: check 'rlboost ps'; 'rlboost logs {pending.id}' shows if none can read it"
        return "a trainer to take the job", because
    held_by = ", ".join(f"{job.id} ({job.state})" for job in holders)
    trainers = "the trainer, which holds" if len(holders) == 1 else "a trainer; they hold"
    because = "a trainer runs one job at a time"
    if paused := next((job.id for job in holders if job.state == "paused"), None):
        because += f": 'rlboost resume {paused}' continues that job, 'rlboost cancel {paused}' ends it"
    return f"{trainers} {held_by}", because


def _why_none(fleet: Fleet) -> str:
    """Return why no worker can take samples: their states, and what the one that waits longest waits for."""
    workers = list(fleet.workers.values())
    if not workers:
        last = next(reversed(fleet.gone.values()), None)
        how = "was lost" if last and last.state == "lost" else "left"
        gone = f" ({last.id} {how}: {last.gone_reason})" if last else ""
        return f"there is no worker{gone}; start one with 'rlboost worker join'"
    states = [worker.state for worker in workers]
    counted = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    waits = [(worker.waiting, worker) for worker in workers if worker.waiting]
    oldest = min(waits, key=lambda found: found[0].since, default=None)
    return counted + (f"; {oldest[1].id} waits for {oldest[0].subject} ({oldest[0].because})" if oldest else "")
