"""Removes workers that left, were lost or are dismissed: their samples are queued, and the jobs get an event."""

from __future__ import annotations

from typing import Literal

from rlboost.services.rollout_manager.domain.effects import ForgetWorker
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages.protocol import PROTOCOL

Preempted = Literal["with_notice", "without_notice"]
"""How a worker's machine was taken; None in its place: the worker left or is dismissed for another reason."""


def on_worker_left(world: World, worker: Worker, now: Now, reason: str) -> None:
    """Remove a worker that has exited as planned, or after a preemption notice."""
    _remove(world, worker, now, "left", reason, "with_notice" if worker.noticed else None)


def lose_worker(world: World, worker: Worker, now: Now) -> None:
    """Declare a worker dead: its lease ran out and its heartbeats stopped."""
    _remove(world, worker, now, "lost", "its lease ran out", "with_notice" if worker.noticed else "without_notice")


def dismiss_mismatched(world: World, worker: Worker, now: Now) -> None:
    """Dismiss a worker that has missed commands: it joins again and is assigned everything anew."""
    reason = "it missed commands: what it holds differs from what it was assigned"
    _remove(world, worker, now, "lost", reason, None)


def dismiss_incompatible(world: World, worker: Worker, now: Now) -> None:
    """Dismiss a worker with another protocol, which an earlier manager had: it cannot join again."""
    reason = f"it has protocol {worker.joined.protocol} and the manager {PROTOCOL}: install the same version of rlboost"
    _remove(world, worker, now, "lost", reason, None)


def _remove(
    world: World, worker: Worker, now: Now, state: Literal["lost", "left"], reason: str, preempted: Preempted | None
) -> None:
    if preempted:
        _count_preemption(world, worker, preempted)
    world.unassign_all(worker, now, state)
    world.fleet.remove(worker, state, reason)
    world.outbox.add(ForgetWorker(worker.id, reason))
    name, job = worker.id, worker.job
    if state == "lost":
        silent_s = round(now.mono - worker.last_seen_at, 3)
        world.emit_event(
            "worker_lost", now, worker=name, job_id=job, reason=reason, preempted=preempted, silent_s=silent_s
        )
    else:
        world.emit_event("worker_left", now, worker=name, job_id=job, reason=reason, preempted=preempted)


def _count_preemption(world: World, worker: Worker, kind: Preempted) -> None:
    world.fleet.on_preempted(worker)
    for job in world.jobs.active():
        if job.state in {"running", "paused"} and worker.job in {job.id, ""}:
            world.audits[job.id].preemptions[kind] += 1
