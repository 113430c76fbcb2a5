"""What a job costs: the time and price of the workers that serve it; and what its budget still pays for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlboost.services.rollout_manager.domain.worker_worth import step_without_spot

if TYPE_CHECKING:
    from rlboost.services.rollout_manager.domain.audit import Audit
    from rlboost.services.rollout_manager.domain.fleet import Worker
    from rlboost.services.rollout_manager.domain.jobs import Job
    from rlboost.services.rollout_manager.domain.world import Now, World

CHARGE_EVERY_S = 1.0
DRAIN_RESERVE_S = 30.0
"""A budget always pays for this much more time of all the job's workers: until the next charge, a drain and an exit."""
_HOUR_S = 3600.0


class WorkerTime(BaseModel):
    """Time of the workers of one role and kind, and its price at the workers' `price_per_hour`."""

    role: str
    kind: str
    seconds: float = 0.0
    dollars: float = 0.0


class Cost(BaseModel):
    """Time of all workers that served one job."""

    charged_until: float = 0.0
    """Unix seconds; 0 before the first charge."""
    workers: dict[str, WorkerTime] = {}
    """By role and kind."""
    budget_reached: bool = False
    """True once the job's remaining budget only just pays for draining its workers. It stays so."""
    reserved_only_s: float = 0.0
    """Estimated duration of the `estimated_steps` with the job's reserved workers alone."""
    reserved_only_dollars: float = 0.0
    """What that would have cost."""
    estimated_steps: int = 0

    def charge(self, role: str, kind: str, price_per_hour: float, seconds: float) -> None:
        """Add the time of one worker."""
        time = self.workers.setdefault(f"{role} {kind}", WorkerTime(role=role, kind=kind))
        time.seconds += seconds
        time.dollars += seconds / _HOUR_S * price_per_hour

    def add_estimate(self, steps: int, step_s: float, dollars: float) -> None:
        """Add what the steps since the last estimate would have taken and cost without preemptible workers, each."""
        new = steps - self.estimated_steps
        self.reserved_only_s += new * step_s
        self.reserved_only_dollars += new * dollars
        self.estimated_steps = steps

    @property
    def dollars(self) -> float:
        """Return the sum over all workers."""
        return sum(time.dollars for time in self.workers.values())


def charge_workers(world: World, now: Now) -> None:
    """Charge each active job with the time of its workers since the last charge, if that is due.

    A worker costs from the start of its process until it is gone, except for time in which it serves no job. Time in
    which no manager led is charged by the next one, for the workers that are still there.
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
            for worker in _workers_of(world, job):
                cost.charge(worker.joined.role, worker.joined.kind, worker.joined.price_per_hour, elapsed_s)
        cost.charged_until = now.wall
        if job.step > cost.estimated_steps and (estimate := step_without_spot(world, job)):
            cost.add_estimate(job.step, *estimate)
        _check_budget(world, job, now)


def charge_startup(world: World, worker: Worker, job: Job) -> None:
    """Charge a job that a worker begins to serve with the time before the worker joined, unless another job was."""
    joined, seconds = worker.joined, worker.unbilled_startup_s
    worker.unbilled_startup_s = 0.0
    if seconds:
        world.audits[job.id].cost.charge(joined.role, joined.kind, joined.price_per_hour, seconds)


def has_budget(world: World, job: Job, worker: Worker | None = None) -> bool:
    """Return True if the job's budget pays for its workers a while longer, and for one more worker if one is given."""
    cost, limit = world.audits[job.id].cost, job.spec.elastic.max_dollars
    if limit is None:
        return True
    if cost.budget_reached:
        return False
    per_hour = sum(member.joined.price_per_hour for member in _workers_of(world, job))
    dollars = cost.dollars + DRAIN_RESERVE_S / _HOUR_S * per_hour
    if worker is not None:
        dollars += (DRAIN_RESERVE_S + worker.unbilled_startup_s) / _HOUR_S * worker.joined.price_per_hour
    return dollars < limit


def _check_budget(world: World, job: Job, now: Now) -> None:
    cost = world.audits[job.id].cost
    if not cost.budget_reached and not has_budget(world, job):
        cost.budget_reached = True
        world.emit_event(
            "budget_reached", now, job.id, dollars=round(cost.dollars, 2), max_dollars=job.spec.elastic.max_dollars
        )


def _workers_of(world: World, job: Job) -> list[Worker]:
    """Return the workers that the job pays for."""
    return [worker for worker in world.fleet.workers.values() if (worker.job or worker.job_id) == job.id]


def cost_report(audit: Audit, steps: int, max_dollars: float | None) -> dict[str, Any]:
    """Return the fields of `GET /v1/jobs/{job_id}/cost`; a ratio is None before its denominator is above 0.

    Args:
        audit: the job's.
        steps: finished steps.
        max_dollars: the job's budget.

    """
    dollars = audit.cost.dollars
    per_token = _ratio(dollars, audit.tokens_generated)
    regenerated = sum(audit.tokens_regenerated.values())
    return {
        "dollars": dollars,
        "max_dollars": max_dollars,
        "budget_reached": audit.cost.budget_reached,
        "workers": [
            {"role": time.role, "kind": time.kind, "hours": time.seconds / _HOUR_S, "dollars": time.dollars}
            for time in audit.cost.workers.values()
        ],
        "dollars_per_step": _ratio(dollars, steps),
        "dollars_per_1000_samples": _ratio(1e3 * dollars, audit.delivered),
        "dollars_per_million_tokens": None if per_token is None else 1e6 * per_token,
        "tokens_saved": audit.tokens_saved,
        "dollars_saved_by_migration": None if per_token is None else per_token * audit.tokens_saved,
        "tokens_regenerated": regenerated,
        "dollars_regenerated": None if per_token is None else per_token * regenerated,
        "dollars_regenerated_by_cause": {
            cause: per_token * tokens for cause, tokens in audit.tokens_regenerated.items() if per_token is not None
        },
        "reserved_only": _reserved_only(audit.cost),
    }


def _reserved_only(cost: Cost) -> dict[str, Any] | None:
    """Return what the finished steps would have taken and cost without preemptible workers, None while unknown.

    The break-even price is what an hour of a preemptible worker may cost for the job to cost as much as without any;
    None before one has served it.
    """
    if not cost.reserved_only_dollars:
        return None
    spot_s = sum(time.seconds for time in cost.workers.values() if time.role == "preemptible")
    reserved_dollars = sum(time.dollars for time in cost.workers.values() if time.role == "reserved")
    saved = max(0.0, cost.reserved_only_dollars - reserved_dollars)
    return {
        "seconds": cost.reserved_only_s,
        "dollars": cost.reserved_only_dollars,
        "break_even_price_per_hour": _ratio(saved * _HOUR_S, spot_s),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
