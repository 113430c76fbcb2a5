"""Every change of a worker that placement depends on is seen at the next read of the candidates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlboost.services.rollout_manager.domain.candidates import CandidatePools
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.queue import Requirement
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.services.rollout_manager.domain.workers import Fleet, Worker
from rlboost.shared.messages import WorkerHeartbeat
from tests.support.builders import group_id, group_requested, heartbeat, worker_joined

SLOTS = 8
REQUIREMENT = Requirement("j", 0, 0)


def sample(number: int = 0) -> Sample:
    return Sample(group_id(number), group_requested(number), "1-0", 0)


def beat(**fields: object) -> WorkerHeartbeat:
    return heartbeat("w", **{"state": "ready", "job_id": "j", "version": 0} | fields)


@pytest.fixture
def fleet() -> Fleet:
    """One worker that is ready, and has one sample."""
    fleet = Fleet(1e9, {})
    fleet.join(worker_joined("w", slots=SLOTS), 0.0)
    worker = fleet.workers["w"]
    fleet.on_heartbeat(worker, beat(), 0.0)
    worker.add(sample())
    worker.set_batch(SLOTS, 1)
    return fleet


def fill(fleet: Fleet, worker: Worker) -> None:
    worker.set_samples(sample(number) for number in range(SLOTS + 1))


CHANGES: dict[str, Callable[[Fleet, Worker], object]] = {
    "samples_set": fill,
    "batch_cap": lambda _, worker: worker.set_batch(0, 1),
    "suspended": lambda _, worker: worker.set_active(active=False),
    "heartbeat": lambda fleet, worker: fleet.on_heartbeat(worker, beat(version=1), 1.0),
    "assigned": lambda fleet, worker: fleet.assign(worker, ("j", 1)),
    "noticed": lambda fleet, worker: fleet.on_notice(worker),
    "drained": lambda fleet, worker: fleet.drain(worker, Now(1.0, 1.0), "a test"),
    "removed": lambda fleet, worker: fleet.remove(worker, "lost", "a test"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_worker_that_can_take_no_more_is_no_candidate_any_longer(fleet: Fleet, change: str) -> None:
    candidates = CandidatePools(fleet)
    assert [pool.best() for pool in candidates.matching(REQUIREMENT)] == ["w"]
    CHANGES[change](fleet, fleet.workers["w"])
    assert not any(pool.best() for pool in candidates.matching(REQUIREMENT))
    assert not any(pool.best() for pool in candidates.by_serving().values() if "w" not in fleet.workers)


@pytest.mark.parametrize("change", ["added", "removed", "released"])
def test_load_of_a_worker_is_ranked_anew(fleet: Fleet, change: str) -> None:
    worker, other = fleet.workers["w"], sample(1)
    worker.set_batch(1, 0)
    if change == "added":
        worker.remove(sample())
    candidates = CandidatePools(fleet)
    had_capacity = any(pool.best() for pool in candidates.matching(REQUIREMENT))
    match change:
        case "added":
            worker.add(other)
        case "removed":
            worker.remove(sample())
        case "released":
            worker.release([sample().id], 0.0)
    assert had_capacity == (change == "added")
    assert any(pool.best() for pool in candidates.matching(REQUIREMENT)) != had_capacity
