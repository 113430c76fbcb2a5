"""Jobs whose trainer is outside of the system: their states follow commands, and whether a trainer is attached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message, pause_without_trainer
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Store, save_job
from rlboost.services.rollout_manager.domain.jobs import JobEntry
from rlboost.services.rollout_manager.domain.wait_status import job_wait_status
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import Event, JobCommand, JobReport, JobState, StepReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Delete
from tests.support.builders import trainer_status

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
