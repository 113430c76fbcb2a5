"""Checks the trainers: reads from their leases what their jobs do and wait for."""

from __future__ import annotations

import structlog
from pydantic import ValidationError

from rlboost.services.rollout_manager.domain.jobs.wait_status import OVERDUE_S, report_overdue
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages import TrainerStatus
from rlboost.shared.process.waiting import count_timeout
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus

log = structlog.get_logger(__name__)


async def check_trainers(bus: Bus, world: World, now: Now) -> None:
    """Record the present value of each running job's trainer lease, and report waits that last too long."""
    running = [job.id for job in world.jobs.active() if job.state != "pending"]
    values = await bus.lease_values([names.trainer_lease(job_id) for job_id in running])
    for job_id, value in zip(running, values, strict=True):
        try:
            status = TrainerStatus.model_validate_json(value) if value else None
        except ValidationError as error:  # as if the trainer were silent
            log.warning("trainer_status_unreadable", job=job_id, reason=str(error))
            continue
        world.progress[job_id].on_trainer_status(status, now.wall)
    for job_id, wait in report_overdue(world, now):
        count_timeout(wait["for"], wait["because"], OVERDUE_S, job=job_id)
