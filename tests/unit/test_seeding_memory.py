"""What a job has learnt of its seeding windows outlives the manager, and is not spoilt by a trainer that dies."""

from __future__ import annotations

import pytest

from services.rollout_manager.domain.actions import SaveJob
from services.rollout_manager.domain.intake import take
from services.rollout_manager.domain.jobs import Job, from_json, to_json
from services.rollout_manager.domain.offload import Meter
from services.rollout_manager.domain.seeding import Window
from services.rollout_manager.domain.world import Now, World
from shared.jobspec import parse
from shared.messages import JobReport, StepReport

SPEC = {"model": "m", "data": {"train": "t.jsonl"}, "reward": {"function": "a:b"}, "steps": 9}


def now(seconds: float) -> Now:
    return Now(mono=seconds, wall=1e9 + seconds)


@pytest.fixture
def job() -> Job:
    return Job("j", 1, parse(SPEC), created_at=0.0, state="running")


@pytest.fixture
def world(job: Job) -> World:
    """In step 3, which began with a window of 10 s, four spot workers and one reserved."""
    world = World(2.0)
    world.add_job(job)
    window = world.windows[job.id] = Window(3, 10.0, phase="ended", began_at=0.0, lasted_s=10.0)
    window.meter = Meter(0.0, 0.0)
    window.meter.update(60.0, fleet=4, reserved=1, working=True)
    window.meter.update(90.0, fleet=4, reserved=1, working=False)
    return world


def step_done() -> StepReport:
    return StepReport(job_id="j", step=3, metrics={}, checkpointed_step=0, wait_s=40.0, train_s=50.0)


def test_what_was_learnt_is_in_the_record_that_is_saved_with_the_step(world: World, job: Job) -> None:
    take(world, step_done(), "1-0", now(100.0))
    assert SaveJob(job) in world.actions
    again = from_json(to_json(job))
    assert again.offload == job.offload
    assert again.offload.memory == {4: job.offload.window_s}
    assert again.offload.choose(4) == (job.offload.window_s, "memory")


def test_a_step_in_whose_middle_the_trainer_began_anew_teaches_nothing(world: World, job: Job) -> None:
    before = to_json(job)
    take(world, JobReport(job_id="j", state="running", step=2), "1-0", now(95.0))
    take(world, step_done(), "2-0", now(100.0))
    assert from_json(to_json(job)).offload == from_json(before).offload
