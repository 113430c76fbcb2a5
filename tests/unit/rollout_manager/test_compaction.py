"""Compaction: which samples are restated, and which jobs are forgotten."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain import decide
from rlboost.services.rollout_manager.domain.decide import compact, forget_ended
from rlboost.services.rollout_manager.domain.effects import Record, forget_job
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.world import World, remove_sample
from rlboost.shared.messages import FINISH_STOP, JobState, Restated
from rlboost.shared.wire import U32, pack
from tests.support.builders import group_id, group_requested, job_spec, placed, token_frame

SPEC = job_spec()


def admit(world: World, number: int, entry_id: str) -> int:
    """One sample in flight, placed."""
    for admitted in world.ledger.admit(group_requested(number), entry_id):
        world.queues.admit(admitted)
    sample = group_id(number)
    world.ledger.place(placed(sample))
    return sample


def make(world: World, sample: int, n: int, finish: int = 0) -> None:
    """Extend a sample by `n` tokens."""
    offset = world.ledger.samples[sample].n_tokens
    world.ledger.extend(token_frame([(sample, 1, offset, n, 0, finish)]))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(decide, "MIN_LOG_TOKENS", 100)
    return World(lease_s=2.0)


def restated(world: World) -> list[int]:
    """Compact the log, and apply the restatements; return their samples."""
    messages = [effect.message for effect in compact(world.ledger) if isinstance(effect, Record)]
    found = [message for message in messages if isinstance(message, Restated)]
    for i, message in enumerate(found):
        world.ledger.restate(message, f"99-{i}")
    return [message.sample for message in found]


def test_log_without_samples_in_flight_is_trimmed_completely(world: World) -> None:
    assert world.ledger.oldest_entry("7-0") == "7-0"


def test_log_is_retained_from_the_oldest_sample(world: World) -> None:
    admit(world, 0, "3-0")
    admit(world, 1, "5-0")
    assert world.ledger.oldest_entry("7-0") == "3-0"
    remove_sample(world, group_id(0))
    assert world.ledger.oldest_entry("7-0") == "5-0"


def test_sample_without_a_log_entry_blocks_no_trimming(world: World) -> None:
    admit(world, 0, "")
    assert world.ledger.oldest_entry("7-0") == "7-0"


def test_long_log_restates_its_oldest_samples_and_is_trimmed(world: World) -> None:
    old, passing = admit(world, 0, "3-0"), admit(world, 1, "4-0")
    make(world, old, 5)
    make(world, passing, 200, FINISH_STOP)
    remove_sample(world, passing)
    young = admit(world, 2, "6-0")
    assert world.ledger.oldest_entry("7-0") == "3-0"
    assert restated(world) == [old]
    assert world.ledger.oldest_entry("8-0") == "6-0"
    assert restated(world) == []
    remove_sample(world, young)
    assert world.ledger.oldest_entry("9-0") == "99-0"


def test_routed_experts_in_the_log_count_by_their_bytes(world: World) -> None:
    old, passing = admit(world, 0, "3-0"), admit(world, 1, "4-0")
    make(world, old, 5)
    frame = token_frame([(passing, 1, 0, 5, 0, FINISH_STOP)])
    world.ledger.extend(frame.model_copy(update={"routed_experts": b"\1" * 1920, "routed_bytes": pack([1920], U32)}))
    remove_sample(world, passing)
    admit(world, 2, "6-0")
    assert restated(world) == [old]
    assert world.ledger.oldest_entry("8-0") == "6-0"


def test_complete_sample_is_not_restated(world: World) -> None:
    old, passing = admit(world, 0, "3-0"), admit(world, 1, "4-0")
    make(world, old, 5, FINISH_STOP)
    make(world, passing, 200)
    remove_sample(world, passing)
    assert world.ledger.oldest_entry("7-0") == "3-0"
    assert restated(world) == []


def test_restatements_of_one_turn_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MAX_RESTATED_TOKENS", 8)
    samples = [admit(world, i, f"{i + 1}-0") for i in range(4)]
    for sample in samples:
        make(world, sample, 5)
    passing = admit(world, 9, "10-0")
    make(world, passing, 200, FINISH_STOP)
    remove_sample(world, passing)
    assert restated(world) == samples[:2]
    assert restated(world) == samples[2:]


@pytest.mark.parametrize(
    ("state", "ended_s_ago", "kept"), [("running", None, True), ("failed", 5.0, True), ("failed", 500.0, False)]
)
def test_audit_of_a_job_that_ended_long_ago_is_dropped(
    world: World, state: JobState, ended_s_ago: float | None, kept: bool
) -> None:
    job = world.jobs.add(Job("j", 1, SPEC, created_at=0.0)).record
    job.enter(state, 0.0 if ended_s_ago is None else 1000.0 - ended_s_ago)
    world.jobs["j"].audit.delivered = 3
    forget_ended(world.jobs, 1000.0)
    assert (world.jobs.audit_of(1) is not None) is kept
    assert world.jobs["j"].audit.delivered == (3 if kept else 0)


@pytest.mark.parametrize(("days_ago", "kept"), [(6.9, True), (7.1, False)])
def test_job_that_ended_a_week_ago_is_forgotten(world: World, days_ago: float, kept: bool) -> None:
    now = 1e9
    world.jobs.add(Job("j", 1, SPEC, created_at=0.0, state="completed", finished_at=now - days_ago * 86_400))
    assert (forget_job("j") in forget_ended(world.jobs, now)) is not kept
    assert ("j" in world.jobs) is kept
