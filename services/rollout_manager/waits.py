"""What a job waits for: the trainer's own wait, a missing trainer, or samples that no worker can take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.domain.world import World


def waiting_of(world: World, job: Job, trainer_lease: str | None, now: float) -> dict[str, Any] | None:
    """Return `{for, because, since, limit_s}`, or None when nothing is waited for.

    Args:
        world: the manager's.
        job: the job asked about.
        trainer_lease: what the trainer last said of itself (JSON), None when it has not for a while.
        now: Unix seconds; `since` is in the same.

    """
    if job.ended:
        return None
    if job.state == "pending":
        because = "it runs one job at a time; of one that it cannot read, its events tell"
        return _wait("the trainer to take the job", because, job.created_at)
    if trainer_lease is None:
        return _wait(
            "the trainer",
            "it holds no lease on this job: it died, cannot reach Redis, or cannot read it: see its logs",
            now,
        )
    if (since := world.stalled_since.get(job.id)) is not None:
        states = [worker.state for worker in world.fleet.workers.values()]
        because = f"samples wait and no worker can take them: {_count(states)}"
        return _wait("a worker that is ready with this job's weights", because, since)
    status = json.loads(trainer_lease)
    waiting: dict[str, Any] | None = status.get("waiting")
    return waiting


def _wait(for_: str, because: str, since: float) -> dict[str, Any]:
    return {"for": for_, "because": because, "since": since, "limit_s": None}


def _count(states: Sequence[str]) -> str:
    if not states:
        return "no worker is here; start one with 'rlboost worker join'"
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
