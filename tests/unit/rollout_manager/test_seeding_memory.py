"""The tuned seeding window survives manager restarts, and a trainer restart does not distort it."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.effects import SaveJob
from rlboost.services.rollout_manager.domain.jobs.record import Job, from_json, to_json
from rlboost.services.rollout_manager.domain.seeding.tuner import Meter
from rlboost.services.rollout_manager.domain.seeding.window import Window
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import JobReport, StepReport

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
    world.jobs[job.id] = job
    window = world.progress[job.id].window = Window(3, 10.0, phase="ended", began_at=0.0, lasted_s=10.0)
    window.meter = Meter(0.0, 0.0)
    window.meter.update(60.0, fleet=4, reserved=1, working=True)
    window.meter.update(90.0, fleet=4, reserved=1, working=False)
    return world


def step_done() -> StepReport:
    return StepReport(job_id="j", step=3, metrics={}, checkpointed_step=0, wait_s=40.0, train_s=50.0)


def test_window_tuner_is_saved_with_the_job_record(world: World, job: Job) -> None:
    apply_message(world, step_done(), "1-0", now(100.0))
    assert SaveJob(job) in world.outbox.effects
    again = from_json(to_json(job))
    assert again.window_tuner == job.window_tuner
    assert again.window_tuner.memory == {4: job.window_tuner.window_s}
    assert again.window_tuner.choose(4) == (job.window_tuner.window_s, "memory")


def test_step_in_which_the_trainer_restarted_is_not_learned_from(world: World, job: Job) -> None:
    before = to_json(job)
    apply_message(world, JobReport(job_id="j", state="running", step=2), "1-0", now(95.0))
    apply_message(world, step_done(), "2-0", now(100.0))
    assert from_json(to_json(job)).window_tuner == from_json(before).window_tuner
