"""Jobs whose trainer is outside of the system: their states follow commands, and whether a trainer is attached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rlboost.services.rollout_manager.api import external
from rlboost.services.rollout_manager.domain.apply_messages import apply_message, pause_without_trainer
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Deliver, Effect, Now, Send, Store, save_job
from rlboost.services.rollout_manager.domain.jobs import JobEntry
from rlboost.services.rollout_manager.domain.wait_status import job_wait_status
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import (
    Event,
    JobCommand,
    JobReport,
    JobState,
    Message,
    SampleDropped,
    StepReport,
    UseVersion,
    WorkerEvent,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Delete, HashSet
from tests.support.builders import (
    group_requested,
    heartbeat,
    job_created,
    trainer_status,
    weights_committed,
    worker_joined,
)
from tests.support.memory_bus import MemoryBus

JOB, PAUSE_AFTER_S = "sums-1", 60.0


def now(at: float) -> Now:
    return Now(mono=at, wall=1000.0 + at)


def command(action: Any, spec: dict[str, Any] | None = None) -> JobCommand:
    return JobCommand(command_id="c", action=action, job_id=JOB, job_no=1, spec_json=json.dumps(spec) if spec else "")


@pytest.fixture
def world() -> World:
    made = World(lease_s=2.0)
    spec = {"kind": "external", "name": "sums", "model": "m", "pause_after_s": PAUSE_AFTER_S}
    apply_message(made, command("create", spec), "1-0", now(0))
    return made


def job(world: World) -> JobEntry:
    return world.jobs[JOB]


def report(world: World, state: JobState, at: float = 0.0) -> None:
    apply_message(world, JobReport(job_id=JOB, state=state, step=0, trainer="external:t"), "2-0", now(at))


def events(effects: Sequence[Effect]) -> list[str]:
    ops = [op for effect in effects if isinstance(effect, Store) for op in effect.ops]
    return [op.message.kind for op in ops if isinstance(op, Append) and isinstance(op.message, Event)]


def wait(world: World) -> dict[str, Any]:
    found = job_wait_status(world.jobs, world.fleet, job(world))
    assert found is not None
    return found


def test_job_waits_for_its_own_trainer_not_for_one_of_the_service(world: World) -> None:
    assert (wait(world)["for"], wait(world)["because"]) == ("its trainer", "none has attached yet")
    report(world, "running")
    job(world).progress.on_trainer_status(None, 1000.0)
    assert "none is attached" in wait(world)["because"]


def test_commands_change_the_state_without_a_report_of_a_trainer(world: World) -> None:
    apply_message(world, command("pause"), "3-0", now(1))
    apply_message(world, command("resume"), "4-0", now(2))
    assert job(world).record.state == "pending"
    report(world, "running")
    for action, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        apply_message(world, command(action), "5-0", now(3))
        assert job(world).record.state == state


def test_job_is_paused_once_it_was_without_a_trainer_for_its_time(world: World) -> None:
    report(world, "running")
    progress = job(world).progress
    progress.on_trainer_status(trainer_status(), 1000.0)
    assert pause_without_trainer(world, now(10 * PAUSE_AFTER_S)) == []
    progress.trainer_renewed_at = None
    progress.on_trainer_status(None, 1000.0)
    assert pause_without_trainer(world, now(PAUSE_AFTER_S - 1)) == []
    effects = pause_without_trainer(world, now(PAUSE_AFTER_S))
    assert events(effects) == ["trainer_missing", "job_state_changed"]
    assert job(world).record.state == "paused"
    assert pause_without_trainer(world, now(2 * PAUSE_AFTER_S)) == []
    report(world, "running")
    assert job(world).record.state == "running"


def workers_refuse(world: World, *workers: str, version: int = 0) -> list[SampleDropped]:
    """Let workers that were commanded to use a version refuse it; return what the manager drops then."""
    fields = {"version": version, "reason": "no tensor 'w'"}
    for worker in workers:
        refused = WorkerEvent(worker=worker, job_id=JOB, kind="weights_refused", at=1, fields=fields)
        apply_message(world, refused, "8-0", now(1))
    delivered = [effect.message for effect in decide(world, now(1)) if isinstance(effect, Deliver)]
    return [message for message in delivered if isinstance(message, SampleDropped)]


def request(world: World, version: int, number: int) -> None:
    apply_message(world, group_requested(number, job_id=JOB, step=version, n=2), "7-0", now(1))


@pytest.fixture
def served(world: World) -> World:
    """Two workers, commanded to use version 0 for two samples."""
    report(world, "running")
    for name in ("a", "b"):
        apply_message(world, worker_joined(name), f"4-{name}", now(0))
        apply_message(world, heartbeat(name, state="joining", job_id="", version=-1), f"5-{name}", now(0))
    apply_message(world, weights_committed(JOB, version=0), "6-0", now(0))
    request(world, 0, 0)
    assert [effect.message for effect in decide(world, now(0)) if isinstance(effect, Send)] == [
        UseVersion(job_id=JOB, version=0)
    ] * 2
    job(world).progress.on_trainer_status(trainer_status(), 1000.0)
    return world


def test_samples_are_dropped_once_each_worker_has_refused_their_version(served: World) -> None:
    assert workers_refuse(served, "a") == []
    assert "does not load" not in wait(served)["because"], "the other one may have another engine"
    dropped = workers_refuse(served, "b")
    assert [message.reason for message in dropped] == ["version 0 does not load on b: no tensor 'w'"] * 2
    assert job(served).audit.dropped == {"refused": 2}
    request(served, 0, 1)
    assert len(workers_refuse(served)) == 2, "later ones as well"
    apply_message(served, weights_committed(JOB, version=1), "9-0", now(2))
    request(served, 1, 2)
    effects = decide(served, now(2))
    assert UseVersion(job_id=JOB, version=1) in [effect.message for effect in effects if isinstance(effect, Send)]
    assert not [effect for effect in effects if isinstance(effect, Deliver)]


def test_worker_that_joins_tries_a_version_that_others_have_refused(served: World) -> None:
    workers_refuse(served, "a", "b")
    apply_message(served, worker_joined("c"), "10-0", now(2))
    apply_message(served, heartbeat("c", state="joining", job_id="", version=-1), "11-0", now(2))
    assert Send("c", UseVersion(job_id=JOB, version=0)) in decide(served, now(2))
    request(served, 0, 1)
    assert workers_refuse(served) == []
    assert len(workers_refuse(served, "c")) == 2


def test_refusal_of_a_version_that_a_worker_was_not_assigned_changes_nothing(served: World) -> None:
    assert workers_refuse(served, "a", "b", version=1) == []
    assert job(served).progress.refusal is None


def test_wait_of_a_job_of_the_service_says_why_its_version_is_refused() -> None:
    world = World(lease_s=2.0)
    messages: list[Message] = [
        job_created(JOB),
        JobReport(job_id=JOB, state="running", step=0),
        worker_joined("a"),
        heartbeat("a", state="joining", job_id="", version=-1),
        weights_committed(JOB, version=0),
        group_requested(job_id=JOB),
    ]
    for number, message in enumerate(messages):
        apply_message(world, message, f"{number + 1}-0", now(0))
    decide(world, now(0))
    job(world).progress.on_trainer_status(trainer_status(), 1000.0)
    assert workers_refuse(world, "a") == [], "its trainer fails the job"
    assert wait(world)["because"].endswith("version 0 does not load on a: no tensor 'w'")


def test_end_of_a_job_takes_it_from_its_trainer(world: World) -> None:
    report(world, "running")
    report(world, "completed", at=5)
    deleted = {op.key for op in save_job(job(world).record).ops if isinstance(op, Delete)}
    keys = (names.trainer_lease, names.trainer_epoch, names.external_trainer, names.external_groups)
    assert deleted == {key(JOB) for key in keys}


def test_steps_of_a_job_without_a_number_are_counted(world: World) -> None:
    report(world, "running")
    apply_message(world, StepReport(job_id=JOB, step=7, metrics={"reward": 0.5}), "6-0", now(1))
    assert (job(world).record.step, job(world).record.public()["steps"]) == (8, 0)
    assert job(world).record.latest == {"reward": 0.5}


async def test_checkpoint_counts_before_the_manager_has_applied_its_report(world: World) -> None:
    """A group that it covers would be ignored, and its trainer would wait for it."""
    record, bus = job(world).record, MemoryBus()
    attached = external.ExternalTrainer(name="t", epoch=1, lease_s=5.0, price_per_hour=0.0, phase_since=0.0)
    await bus.increment(names.trainer_epoch(JOB))
    await bus.transact([HashSet(names.external_trainer(JOB), {"trainer": attached.model_dump_json()})])
    held = external.HeldJob(record, bus)
    checkpoint = external.Checkpoint(step=3, cursor="5-0")
    for step, covers in ((2, checkpoint), (3, None), (4, external.Checkpoint(step=1, cursor="4-0"))):
        await external.complete_step(held, external.StepBody(epoch=1, step=step, checkpoint=covers))
        assert (record.checkpointed_step, await held.state(1)) == (0, (attached, checkpoint))
