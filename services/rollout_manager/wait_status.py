"""What a job waits for: its trainer's own wait, a missing trainer, or samples that no worker can take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.world import World


def job_wait_status(world: World, job: Job, trainer_status: str | None, now: float) -> dict[str, Any] | None:
    """Return `{for, because, since, limit_s}` (Unix seconds), or None if the job waits for nothing.

    Args:
        world: the manager's world.
        job: the job.
        trainer_status: the value of the trainer's lease on the job (JSON), None if no trainer holds it.
        now: Unix seconds.

    """
    if job.ended:
        return None
    if job.state == "pending":
        return _wait(*_trainer_of_pending(world), job.created_at)
    if trainer_status is None:
        because = "it holds no lease on this job: it died, cannot reach Redis, or cannot read the job: look at its log"
        return _wait("the trainer", because, now)
    if (progress := world.progress.get(job.id)) and progress.stalled_since is not None:
        states = [worker.state for worker in world.fleet.workers.values()]
        because = f"samples are queued and no worker can take them: {_count(states)}"
        if world.audits[job.id].cost.budget_reached:
            because = (
                f"its budget (elastic.max_dollars: {job.spec.elastic.max_dollars:g}) pays for no more preemptible "
                "workers: add reserved workers, or cancel it and continue from its model in another job"
            )
        return _wait("a worker that is ready with this job's weights", because, progress.stalled_since)
    waiting: dict[str, Any] | None = json.loads(trainer_status).get("waiting")
    return waiting


def _trainer_of_pending(world: World) -> tuple[str, str]:
    """Return what a pending job waits for and why: the jobs that hold the trainers, by state."""
    holders = [job for job in world.jobs.active() if job.state != "pending"]
    if not holders:
        return "a trainer to take the job", "none has taken it; its events tell if none can read its job file"
    held_by = ", ".join(f"{job.id} ({job.state})" for job in holders)
    trainers = "the trainer, which holds" if len(holders) == 1 else "a trainer; they hold"
    because = "a trainer runs one job at a time"
    if paused := next((job.id for job in holders if job.state == "paused"), None):
        because += f": 'rlboost resume {paused}' lets that job end, 'rlboost cancel {paused}' gives up on it"
    return f"{trainers} {held_by}", because


def _wait(for_: str, because: str, since: float) -> dict[str, Any]:
    return {"for": for_, "because": because, "since": since, "limit_s": None}


def _count(states: Sequence[str]) -> str:
    if not states:
        return "there is no worker; start one with 'rlboost worker join'"
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
