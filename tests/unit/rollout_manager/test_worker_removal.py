"""The events of jobs about workers that leave, are lost or are dismissed."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Effect
from rlboost.services.rollout_manager.domain.stalls import dismiss_mismatched, lose_worker
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import PreemptionNotice, WorkerLeft
from rlboost.shared.streams import names
from tests.support.builders import group_requested, heartbeat, job_running, worker_joined
from tests.support.scheduler_turns import NOW, apply, events_in


@pytest.fixture
def world() -> World:
    """Two running jobs; worker `a` serves the first, `b` the second, and `idle` none."""
    world = World(lease_s=2.0)
    apply(world, *job_running("first", 1), *job_running("second", 2))
    for name, job in (("a", "first"), ("b", "second"), ("idle", "")):
        apply(world, worker_joined(name))
        if job:
            world.fleet.workers[name].assigned_version = (job, 0)
    return world


def events(world: World, effects: list[Effect], *kinds: str) -> dict[str, list[dict[str, Any]]]:
    """Return the fields of the events that each job's readers see."""
    emitted = [(stream, event) for stream, event in events_in(effects) if event.kind in kinds]
    assert all("job_id" in event.fields for stream, event in emitted if stream == names.FLEET_EVENTS)
    return {
        job.id: [
            event.fields
            for stream, event in emitted
            if stream == names.job_events(job.id) or (stream == names.FLEET_EVENTS and job.is_concerned_by(event))
        ]
        for job in (entry.record for entry in world.jobs.values())
    }


def preemptions(world: World) -> tuple[int, int]:
    first, second = (sum(world.jobs[job].audit.preemptions.values()) for job in ("first", "second"))
    return first, second


def test_lost_worker_is_a_preemption_of_the_job_that_it_served(world: World) -> None:
    worker = world.fleet.workers["b"]
    worker.last_seen_at = NOW.mono - 2.5
    effects = lose_worker(world.jobs, world.fleet, world.queues, worker, NOW)
    lost: dict[str, Any] = {"worker": "b", "job_id": "second", "preempted": "without_notice", "silent_s": 2.5}
    lost["reason"] = "its lease ran out"
    assert events(world, effects, "worker_lost") == {"first": [], "second": [lost]}
    assert preemptions(world) == (0, 1)


def test_dismissed_worker_is_no_preemption(world: World) -> None:
    seen = events(
        world, dismiss_mismatched(world.jobs, world.fleet, world.queues, world.fleet.workers["a"], NOW), "worker_lost"
    )["first"]
    assert [(one["job_id"], one["preempted"]) for one in seen] == [("first", None)]
    assert preemptions(world) == (0, 0)


def test_worker_that_leaves_after_a_notice_is_a_preemption_with_notice(world: World) -> None:
    notice = PreemptionNotice(worker="a", at=0.0, lead_s=30.0, reason="sigterm")
    effects = apply(world, notice, WorkerLeft(worker="a", at=0.0, reason="sigterm"))
    for name in ("b", "idle"):
        effects += apply(world, WorkerLeft(worker=name, at=0.0, reason="drained"))
    seen = events(world, effects, "worker_notice", "worker_left")
    idle = ("idle", "", None)
    assert {
        job: [(one["worker"], one["job_id"], one.get("preempted")) for one in fields] for job, fields in seen.items()
    } == {
        "first": [("a", "first", None), ("a", "first", "with_notice"), idle],
        "second": [("b", "second", None), idle],
    }
    assert preemptions(world) == (1, 0)


def test_worker_without_a_job_that_is_lost_is_a_preemption_of_all_jobs(world: World) -> None:
    effects = lose_worker(world.jobs, world.fleet, world.queues, world.fleet.workers["idle"], NOW)
    assert [one["job_id"] for one in events(world, effects, "worker_lost")["first"]] == [""]
    assert preemptions(world) == (1, 1)


def test_unassigned_samples_are_an_event_of_their_job_alone(world: World) -> None:
    apply(world, heartbeat("b", job_id="second"), group_requested(job_id="second", job_no=2))
    decide(world, NOW)
    effects = lose_worker(world.jobs, world.fleet, world.queues, world.fleet.workers["b"], NOW)
    seen = events(world, effects, "samples_unassigned")
    assert seen == {"first": [], "second": [{"worker": "b", "samples": 1, "tokens": 0, "cause": "lost"}]}
