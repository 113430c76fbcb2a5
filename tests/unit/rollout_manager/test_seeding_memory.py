"""The tuned seeding window survives manager restarts, and a trainer restart does not distort it."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.effects import Now, save_job
from rlboost.services.rollout_manager.domain.jobs import FleetCounts, Job, from_json, to_json
from rlboost.services.rollout_manager.domain.queue import Requirement
from rlboost.services.rollout_manager.domain.step_windows import advance_window
from rlboost.services.rollout_manager.domain.windows import StepMeter, Window, WindowTuner
from rlboost.services.rollout_manager.domain.world import World
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
    world.jobs.add(job)
    window = world.jobs[job.id].progress.window = Window(3, 10.0, phase="ended", began_at=0.0, lasted_s=10.0)
    window.meter = StepMeter(0.0, 0.0)
    window.meter.update(60.0, fleet=4, reserved=1, working=True)
    window.meter.update(90.0, fleet=4, reserved=1, working=False)
    return world


def step_done() -> StepReport:
    return StepReport(job_id="j", step=3, metrics={}, checkpointed_step=0, wait_s=40.0, train_s=50.0)


def test_window_tuner_is_saved_with_the_job_record(world: World, job: Job) -> None:
    effects = apply_message(world, step_done(), "1-0", now(100.0))
    assert save_job(job) in effects
    again = from_json(to_json(job))
    assert again.window_tuner == job.window_tuner
    assert again.window_tuner.memory == {4: job.window_tuner.window_s}
    assert again.window_tuner.choose(4, 2) == (job.window_tuner.window_s, "memory")


def test_step_in_which_the_trainer_restarted_is_not_learned_from(world: World, job: Job) -> None:
    before = to_json(job)
    apply_message(world, JobReport(job_id="j", state="running", step=2), "1-0", now(95.0))
    apply_message(world, step_done(), "2-0", now(100.0))
    assert from_json(to_json(job)).window_tuner == from_json(before).window_tuner


def test_open_window_follows_the_number_of_preemptible_workers(world: World, job: Job) -> None:
    job.window_tuner = WindowTuner(window_s=40.0, memory={2: 12.0}, work_s=90.0, train_s=20.0, fleet_mean=1, reserved=1)
    progress = world.jobs["j"].progress
    progress.window = window = Window(3, 40.0, began_at=0.0, fleet=1)
    world.queues.in_flight.add(Requirement("j", 3, 3))
    lengths = []
    for fleet in (1, 2, 3):
        progress.fleet = FleetCounts(reserved=1, preemptible=fleet)
        advance_window(world.jobs, world.fleet, world.ledger, world.queues, world.jobs["j"], now(1.0))
        lengths.append(window.length_s)
    # One: 45 s for both engines, less the part of 90 s that the worker generates during 20 s. Three: 22.5 and 30 s.
    assert lengths == [40.0, 12.0, pytest.approx(40.0 + 22.5 * 10 / 30 - 45 * 70 / 90)]
    window.phase, progress.fleet = "ended", FleetCounts(reserved=1, preemptible=2)
    advance_window(world.jobs, world.fleet, world.ledger, world.queues, world.jobs["j"], now(2.0))
    assert window.length_s == lengths[-1], "it has ended"
