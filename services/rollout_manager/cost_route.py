"""`GET /v1/jobs/{job_id}/cost`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from rlboost.services.rollout_manager.domain.audit import Audit
from rlboost.services.rollout_manager.domain.cost import cost_report
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.shared import names
from rlboost.shared.bus import Bus


def add_cost_route(router: APIRouter, find_job: Callable[[str], Job], bus: Bus) -> None:
    """Add the route; `find_job` returns a job by id or raises `Problem`."""

    @router.get("/jobs/{job_id}/cost", tags=["history"])
    async def cost(job_id: str) -> dict[str, Any]:
        """Return what the job's workers have cost, in all and per step, sample and token, and what migration saved."""
        job = find_job(job_id)
        stored = await bus.hash_get(names.job_audit(job.id), "counters")
        return cost_report(Audit.model_validate_json(stored) if stored else Audit(), job.step)
