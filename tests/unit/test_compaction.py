"""What is written again and what is forgotten, so that log and memory follow work in flight."""

from __future__ import annotations

import pytest

from services.rollout_manager.domain import compaction
from services.rollout_manager.domain.actions import ForgetJob, Record
from services.rollout_manager.domain.compaction import compact, forget_ended
from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.domain.world import World
from shared.columns import F32, I32, U8, U32, U64, pack
from shared.ids import SampleId
from shared.jobspec import parse
from shared.messages import FINISH_STOP, GroupRequested, JobState, Placed, Restated, Sampling, TokenFrame

SPEC = parse({"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 9})


def group(number: int) -> int:
    return SampleId(1, False, 0, number, 0).pack()


def admit(world: World, number: int, entry_id: str) -> int:
    """One sample in flight, placed."""
    request = GroupRequested(
        job_id="j", group=group(number), n=1, prompt=b"1234", sampling=Sampling(), version=0, seed=1
    )
    world.admitted(world.ledger.admit(request, entry_id))
    sample = group(number)
    world.ledger.place(Placed(worker="w", samples=pack([sample], U64), attempts=pack([1], U32), offsets=pack([0], U32)))
    return sample


def make(world: World, sample: int, n: int, finish: int = 0) -> None:
    """Let a sample have `n` tokens more."""
    world.ledger.extend(
        TokenFrame(
            worker="w",
            seq=0,
            samples=pack([sample], U64),
            attempts=pack([1], U32),
            offsets=pack([world.ledger.samples[sample].n_tokens], U32),
            counts=pack([n], U32),
            versions=pack([0], U32),
            finish=pack([finish], U8),
            tokens=pack([1] * n, I32),
            logprobs=pack([-1.0] * n, F32),
        )
    )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(compaction, "MIN_LOG_TOKENS", 100)
    return World(lease_s=2.0)


def restated(world: World) -> list[int]:
    """The samples that it wants written again, which then stand at the log's end."""
    messages = [action.message for action in world.take_actions() if isinstance(action, Record)]
    found = [message for message in messages if isinstance(message, Restated)]
    for i, message in enumerate(found):
        world.ledger.restate(message, f"99-{i}")
    return [message.sample for message in found]


def test_with_nothing_in_flight_everything_that_was_read_may_go(world: World) -> None:
    assert compact(world, "7-0") == "7-0"


def test_the_log_is_kept_from_the_oldest_sample_on(world: World) -> None:
    admit(world, 0, "3-0")
    admit(world, 1, "5-0")
    assert compact(world, "7-0") == "3-0"
    world.close([group(0)])
    assert compact(world, "7-0") == "5-0"


def test_a_sample_that_is_short_of_its_entry_in_the_log_holds_nothing_back(world: World) -> None:
    admit(world, 0, "")
    assert compact(world, "7-0") == "7-0"


def test_a_long_log_s_oldest_samples_are_written_again_and_what_is_before_them_may_go(world: World) -> None:
    old, passing = admit(world, 0, "3-0"), admit(world, 1, "4-0")
    make(world, old, 5)
    make(world, passing, 200, FINISH_STOP)
    world.close([passing])
    young = admit(world, 2, "6-0")
    assert compact(world, "7-0") == "3-0"
    assert restated(world) == [old]
    assert compact(world, "8-0") == "6-0"
    assert restated(world) == []
    world.close([young])
    assert compact(world, "9-0") == "99-0"


def test_a_complete_sample_is_not_written_again(world: World) -> None:
    old, passing = admit(world, 0, "3-0"), admit(world, 1, "4-0")
    make(world, old, 5, FINISH_STOP)
    make(world, passing, 200)
    world.close([passing])
    assert compact(world, "7-0") == "3-0"
    assert restated(world) == []


def test_no_more_is_written_again_at_once_than_a_turn_can_carry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "RESTATED_TOKENS_AT_ONCE", 8)
    samples = [admit(world, i, f"{i + 1}-0") for i in range(4)]
    for sample in samples:
        make(world, sample, 5)
    passing = admit(world, 9, "10-0")
    make(world, passing, 200, FINISH_STOP)
    world.close([passing])
    compact(world, "11-0")
    assert restated(world) == samples[:2]
    compact(world, "12-0")
    assert restated(world) == samples[2:]


@pytest.mark.parametrize(
    ("state", "ended_s_ago", "kept"), [("running", None, True), ("failed", 5.0, True), ("failed", 500.0, False)]
)
def test_the_audit_of_a_job_that_is_long_over_is_forgotten(
    world: World, state: JobState, ended_s_ago: float | None, kept: bool
) -> None:
    ended_at = None if ended_s_ago is None else 1000.0 - ended_s_ago
    world.add_job(Job("j", 1, SPEC, created_at=0.0, state=state, finished_at=ended_at))
    world.audits["j"].delivered = 3
    forget_ended(world, 1000.0)
    assert ("j" in world.audits) is kept
    assert (world.audit_of(1) is not None) is kept
    assert ("j" in world.audits) is kept, "looking for it has made it anew"


@pytest.mark.parametrize(("days_ago", "kept"), [(6.9, True), (7.1, False)])
def test_a_job_that_is_over_for_a_week_is_forgotten(world: World, days_ago: float, kept: bool) -> None:
    now = 1e9
    world.add_job(Job("j", 1, SPEC, created_at=0.0, state="completed", finished_at=now - days_ago * 86_400))
    forget_ended(world, now)
    assert ("j" in world.jobs) is kept
    assert (ForgetJob("j") in world.take_actions()) is not kept
