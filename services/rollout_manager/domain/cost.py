"""What a job costs: the time and price of the workers that serve it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from rlboost.services.rollout_manager.domain.audit import Audit
    from rlboost.services.rollout_manager.domain.world import Now, World

CHARGE_EVERY_S = 1.0
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

    def charge(self, role: str, kind: str, price_per_hour: float, seconds: float) -> None:
        """Add the time of one worker."""
        time = self.workers.setdefault(f"{role} {kind}", WorkerTime(role=role, kind=kind))
        time.seconds += seconds
        time.dollars += seconds / _HOUR_S * price_per_hour

    @property
    def dollars(self) -> float:
        """Return the sum over all workers."""
        return sum(time.dollars for time in self.workers.values())


def charge_workers(world: World, now: Now) -> None:
    """Charge each active job with the time of its workers since the last charge, if that is due.

    A worker costs from when it is commanded to serve the job, the pull of weights included, until it is gone. Time in
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
            for worker in world.fleet.workers.values():
                if (worker.job or worker.job_id) == job.id:
                    joined = worker.joined
                    cost.charge(joined.role, joined.kind, joined.price_per_hour, elapsed_s)
        cost.charged_until = now.wall


def cost_report(audit: Audit, steps: int) -> dict[str, Any]:
    """Return the fields of `GET /v1/jobs/{job_id}/cost`; a ratio is None before its denominator is above 0.

    Args:
        audit: the job's.
        steps: finished steps.

    """
    dollars = audit.cost.dollars
    per_token = _ratio(dollars, audit.tokens_generated)
    regenerated = sum(audit.tokens_regenerated.values())
    return {
        "dollars": dollars,
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
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
