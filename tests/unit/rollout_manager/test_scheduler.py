"""The scheduler in the manager's state: which versions may generate a sample, preferred workers, overdue releases."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_delivered
from rlboost.services.rollout_manager.domain.effects import Effect, Send
from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS
from rlboost.services.rollout_manager.domain.placement import (
    REBALANCE_EVERY_S,
    RELEASE_LIMIT_S,
    place_queued,
    rebalance,
    reclaim,
)
from rlboost.services.rollout_manager.domain.queue import unassign
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.job.fleet import SamplingSpec
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.messages import Admitted, Release, Restated, Revoke, SampleDropped
from rlboost.shared.wire import I32, U64, ints, pack
from tests.support.builders import (
    group_id,
    group_requested,
    heartbeat,
    job_running,
    token_frame,
    weights_committed,
    worker_joined,
)
from tests.support.scheduler_turns import NOW, apply, prove

STEP = 3
SAMPLE = group_id(step=STEP)


def world_with(**versions: int) -> World:
    """A job of which version `STEP` is committed, and workers that serve these versions."""
    world = World(lease_s=2.0)
    apply(world, *job_running(), weights_committed(version=STEP))
    for name, version in versions.items():
        apply(world, worker_joined(name, slots=1), heartbeat(name, version=version))
    return world


def owner(world: World, sample: int = SAMPLE) -> str:
    place_queued(world, NOW)
    return world.ledger.samples[sample].worker


def revoked(effects: list[Effect]) -> list[int]:
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [sample for message in sent if isinstance(message, Revoke) for sample in ints(message.samples, U64)]


def released(effects: list[Effect]) -> list[int]:
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [sample for message in sent if isinstance(message, Release) for sample in ints(message.samples, U64)]


@pytest.mark.parametrize(("version", "may"), [(1, False), (2, True), (3, True), (4, False)])
def test_sample_goes_only_to_versions_within_its_staleness(version: int, may: bool) -> None:
    world = world_with(w=version)
    apply(world, group_requested(step=STEP, max_staleness=1))
    assert owner(world) == ("w" if may else "")


@pytest.mark.parametrize(("version", "is_full", "chosen"), [(3, False, "z"), (3, True, "a"), (1, False, "a")])
def test_preferred_worker_needs_the_version_and_capacity(version: int, is_full: bool, chosen: str) -> None:
    world = world_with(z=version)
    for number in range(1, 20 if is_full else 1):
        apply(world, group_requested(number, step=STEP))
    place_queued(world, NOW)
    apply(world, worker_joined("a", slots=64), heartbeat("a", version=STEP))
    apply(world, group_requested(step=STEP, preferred_worker="z"))
    assert owner(world) == chosen


def test_sample_that_has_run_ignores_its_preferred_worker() -> None:
    world = world_with(z=STEP)
    apply(world, group_requested(step=STEP, preferred_worker="z"))
    assert owner(world) == "z"
    apply(world, worker_joined("a", slots=64), heartbeat("a", version=STEP))
    unassign(world.fleet, world.queues, world.ledger.samples[SAMPLE])
    assert owner(world) == "a"


def unequal_loads() -> World:
    """Return a world in which one worker has many samples, and another one none."""
    world = world_with()
    apply(world, worker_joined("w", slots=64), heartbeat("w", version=STEP))
    for running in (1, 4, 16, 64) * MIN_OBSERVATIONS:
        world.fleet.workers["w"].profile.observe(running, 100 * running, running / (0.02 + 0.002 * running))
    apply(world, group_requested(step=STEP, n=32, max_tokens=1000))
    prove(world)
    assert owner(world) == "w"
    apply(world, worker_joined("z", slots=64), heartbeat("z", version=STEP))
    return world


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"sampling": SamplingSpec(min_p=0.1)}, "min_p"),
        ({"trainer": TrainerSpec(deterministic=True)}, "batch_invariant"),
    ],
)
def test_samples_do_not_migrate_to_a_worker_without_the_jobs_options(changes: dict[str, Any], option: str) -> None:
    world = unequal_loads()
    record = world.jobs["j"].record
    record.spec = record.spec.model_copy(update=changes)
    world.fleet.workers["w"].sampling_options = frozenset({option})
    assert rebalance(world, NOW) == []
    world.fleet.workers["z"].sampling_options = frozenset({option})
    assert released(rebalance(world, NOW._replace(mono=NOW.mono + 2 * REBALANCE_EVERY_S)))


def test_rebalance_waits_for_the_releases_under_way() -> None:
    world = unequal_loads()
    assert released(rebalance(world, NOW))
    assert released(rebalance(world, NOW._replace(mono=NOW.mono + 2 * REBALANCE_EVERY_S))) == []


def test_release_that_is_overdue_is_revoked_and_queued() -> None:
    world = world_with(w=STEP)
    apply(world, group_requested(step=STEP))
    assert owner(world) == "w"
    worker = world.fleet.workers["w"]
    reclaim(worker, [worker.samples[SAMPLE]], NOW)
    assert revoked(rebalance(world, NOW._replace(mono=NOW.mono + RELEASE_LIMIT_S))) == []
    assert revoked(rebalance(world, NOW._replace(mono=NOW.mono + RELEASE_LIMIT_S + 1))) == [SAMPLE]
    assert world.ledger.is_queued(SAMPLE)
    assert not worker.releasing


def test_gap_revokes_the_sample_and_queues_it() -> None:
    world = world_with(w=STEP)
    apply(world, group_requested(step=STEP))
    assert owner(world) == "w"
    assert revoked(apply(world, token_frame([(SAMPLE, 1, 5, 2, STEP, 0)]))) == [SAMPLE]
    assert world.ledger.is_queued(SAMPLE)


def test_replayed_record_of_a_delivered_sample_admits_nothing() -> None:
    """The log was trimmed less far than the trainer's stream was read."""
    request = group_requested(step=STEP)
    restated = Restated(
        request=request, sample=SAMPLE, attempt=1, worker="w", tokens=pack([1], I32), logprobs=pack([0], I32), spans=[]
    )
    for record in (Admitted(request=request), restated):
        world = world_with()
        dropped = SampleDropped(sample=SAMPLE, reason="", group_done=True)
        apply_delivered(world.jobs["j"].progress, dropped)
        apply(world, record)
        assert not world.ledger.samples, record.tag
        assert not world.queues.in_flight.by_requirement
        apply(world, group_requested(1, step=STEP))
        assert list(world.ledger.samples) == [group_id(1, step=STEP)], "other groups of the step are"
