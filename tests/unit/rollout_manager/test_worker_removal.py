"""The events of jobs about workers that leave, are lost or are dismissed."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import EmitEvent
from rlboost.services.rollout_manager.domain.worker_removal import dismiss_mismatched, lose_worker
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.messages import Message, PreemptionNotice, WorkerLeft
from tests.support.builders import group_requested, heartbeat, job_running, worker_joined

NOW = Now(mono=1.0, wall=1000.0)


def apply(world: World, *messages: Message) -> None:
    for number, message in enumerate(messages):
        apply_message(world, message, f"{number + 1}-0", NOW)


@pytest.fixture
def world() -> World:
    """Two running jobs; worker `a` serves the first, `b` the second, and `idle` none."""
    world = World(lease_s=2.0)
    apply(world, *job_running("first", 1), *job_running("second", 2))
    for name, job in (("a", "first"), ("b", "second"), ("idle", "")):
        apply(world, worker_joined(name))
        if job:
            world.fleet.assign(world.fleet.workers[name], (job, 0))
    world.outbox.take()
    return world


def events(world: World, *kinds: str) -> dict[str, list[dict[str, Any]]]:
    """Return the fields of the new events of each job."""
    found: dict[str, list[dict[str, Any]]] = {"first": [], "second": []}
    for effect in world.outbox.take():
        if isinstance(effect, EmitEvent) and effect.event.kind in kinds:
            found[effect.job_id].append(effect.event.fields)
    return found


def preemptions(world: World) -> tuple[int, int]:
    first, second = (sum(world.audits[job].preemptions.values()) for job in ("first", "second"))
    return first, second


def test_lost_worker_is_a_preemption_of_the_job_that_it_served(world: World) -> None:
    worker = world.fleet.workers["b"]
    worker.last_seen_at = NOW.mono - 2.5
    lose_worker(world, worker, NOW)
    lost: dict[str, Any] = {"worker": "b", "job_id": "second", "preempted": "without_notice", "silent_s": 2.5}
    lost["reason"] = "its lease ran out"
    assert events(world, "worker_lost") == {"first": [lost], "second": [lost]}
    assert preemptions(world) == (0, 1)


def test_dismissed_worker_is_no_preemption(world: World) -> None:
    dismiss_mismatched(world, world.fleet.workers["a"], NOW)
    seen = events(world, "worker_lost")["first"]
    assert [(one["job_id"], one["preempted"]) for one in seen] == [("first", None)]
    assert preemptions(world) == (0, 0)


def test_worker_that_leaves_after_a_notice_is_a_preemption_with_notice(world: World) -> None:
    notice = PreemptionNotice(worker="a", at=0.0, lead_s=30.0, reason="sigterm")
    apply(world, notice, WorkerLeft(worker="a", at=0.0, reason="sigterm"))
    for name in ("b", "idle"):
        apply(world, WorkerLeft(worker=name, at=0.0, reason="drained"))
    seen = events(world, "worker_notice", "worker_left")["second"]
    assert [(one["worker"], one["job_id"], one.get("preempted")) for one in seen] == [
        ("a", "first", None),
        ("a", "first", "with_notice"),
        ("b", "second", None),
        ("idle", "", None),
    ]
    assert preemptions(world) == (1, 0)


def test_worker_without_a_job_that_is_lost_is_a_preemption_of_all_jobs(world: World) -> None:
    lose_worker(world, world.fleet.workers["idle"], NOW)
    assert [one["job_id"] for one in events(world, "worker_lost")["first"]] == [""]
    assert preemptions(world) == (1, 1)


def test_unassigned_samples_are_an_event_of_their_job_alone(world: World) -> None:
    apply(world, heartbeat("b", job_id="second"), group_requested(job_id="second", job_no=2))
    decide(world, NOW)
    lose_worker(world, world.fleet.workers["b"], NOW)
    seen = events(world, "samples_unassigned")
    assert seen == {"first": [], "second": [{"worker": "b", "samples": 1, "tokens": 0, "cause": "lost"}]}
