"""What a job waits for, as `status`, `ps` and `--follow` show it."""

from __future__ import annotations

from typing import Any

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.services.rollout_manager.wait_status import job_wait_status
from rlboost.shared.messages import JobReport, JobState
from tests.support.builders import job_created

NOW = Now(mono=1.0, wall=1000.0)


def wait_of_queued(*states: JobState) -> dict[str, Any]:
    """Return what a pending job waits for; the jobs before it have these states."""
    world = World(lease_s=2.0)
    for number, state in enumerate(states):
        apply_message(world, job_created(f"j-{number}", number), f"{2 * number + 1}-0", NOW)
        apply_message(world, JobReport(job_id=f"j-{number}", state=state, step=0), f"{2 * number + 2}-0", NOW)
    apply_message(world, job_created("queued", len(states)), "99-0", NOW)
    wait = job_wait_status(world, world.jobs["queued"], None, NOW.wall)
    assert wait is not None
    return wait


def test_a_job_queued_after_a_paused_one_names_it_and_both_ways_out() -> None:
    wait = wait_of_queued("completed", "paused")
    assert wait["for"] == "the trainer, which holds j-1 (paused)"
    assert "'rlboost resume j-1'" in wait["because"]
    assert "'rlboost cancel j-1'" in wait["because"]


def test_a_job_queued_after_running_ones_names_all() -> None:
    wait = wait_of_queued("running", "running")
    assert wait["for"] == "a trainer; they hold j-0 (running), j-1 (running)"
    assert "rlboost" not in wait["because"]


def test_a_job_that_no_trainer_took_points_to_its_events() -> None:
    assert wait_of_queued()["for"] == "a trainer to take the job"
