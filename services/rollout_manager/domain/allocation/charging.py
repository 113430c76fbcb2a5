"""Charges jobs with the time of their workers and trainers, and checks what their budgets still pay for."""

from __future__ import annotations

from rlboost.services.rollout_manager.domain.allocation.worth import step_without_spot
from rlboost.services.rollout_manager.domain.jobs.record import Job
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.units import HOUR_S

CHARGE_EVERY_S = 1.0
DRAIN_RESERVE_S = 30.0
"""A budget always pays for this much more time of all the job's workers: until the next charge, a drain and an exit."""


def charge_jobs(world: World, now: Now) -> None:
    """Charge each active job with the time of its workers and its trainer since the last charge, if that is due.

    A worker costs from the start of its process until it is gone, except for time in which it serves no job; a trainer
    while it holds the job's lease. Time in which no manager led is charged by the next one, for those that are still
    there.
    """
    last = world.periodic.charged_at
    if last is not None and now.mono - last < CHARGE_EVERY_S:
        return
    world.periodic.charged_at = now.mono
    for job in world.jobs.active():
        cost = world.audits[job.id].cost
        # Within one manager's life the monotonic clock counts: the system's may be set.
        elapsed_s = now.mono - last if last is not None else max(0.0, now.wall - cost.charged_until)
        if cost.charged_until:
            for worker in _billed_workers(world, job):
                cost.charge(worker.joined.role, worker.joined.kind, worker.price_per_hour, elapsed_s)
            if trainer_price := world.progress[job.id].trainer_price_per_hour:
                cost.charge("trainer", "", trainer_price, elapsed_s)
        cost.charged_until = now.wall
        if job.step > cost.estimated_steps and (estimate := step_without_spot(world, job)):
            cost.add_estimate(job.step, *estimate)
        _check_budget(world, job, now)


def charge_startup(world: World, worker: Worker, job: Job) -> None:
    """Charge a job that a worker begins to serve with the time before the worker joined, unless another job was."""
    joined, seconds = worker.joined, worker.unbilled_startup_s
    worker.unbilled_startup_s = 0.0
    if seconds:
        world.audits[job.id].cost.charge(joined.role, joined.kind, worker.price_per_hour, seconds)


def has_budget(world: World, job: Job, worker: Worker | None = None) -> bool:
    """Return True if the job's budget pays for its trainer and workers a while longer, and for one more, if given."""
    cost, limit = world.audits[job.id].cost, job.spec.elastic.max_dollars
    if limit is None:
        return True
    if cost.budget_reached:
        return False
    per_hour = world.progress[job.id].trainer_price_per_hour
    per_hour += sum(member.price_per_hour for member in _billed_workers(world, job))
    dollars = cost.dollars + DRAIN_RESERVE_S / HOUR_S * per_hour
    if worker is not None:
        dollars += (DRAIN_RESERVE_S + worker.unbilled_startup_s) / HOUR_S * worker.price_per_hour
    return dollars < limit


def _check_budget(world: World, job: Job, now: Now) -> None:
    cost = world.audits[job.id].cost
    if not cost.budget_reached and not has_budget(world, job):
        cost.budget_reached = True
        world.emit_event(
            "budget_reached", now, job.id, dollars=round(cost.dollars, 2), max_dollars=job.spec.elastic.max_dollars
        )


def _billed_workers(world: World, job: Job) -> list[Worker]:
    """Return the workers that the job pays for."""
    return [worker for worker in world.fleet.workers.values() if (worker.job or worker.job_id) == job.id]
