"""Requests for groups that the manager refuses."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.errors import Unprocessable
from rlboost.shared.messages import GroupRequested
from tests.support.builders import group_requested, job_created

NOW = Now(mono=1.0, wall=1000.0)


@pytest.fixture
def world() -> World:
    """Two jobs, number 1 and number 2."""
    world = World(lease_s=2.0)
    for number in (1, 2):
        apply_message(world, job_created(f"j{number}", number), f"{number}-0", NOW)
    return world


def request(job_id: str, job_no: int) -> GroupRequested:
    return group_requested(job_id=job_id, job_no=job_no, n=2)


def test_group_whose_number_is_of_another_job_is_refused_and_changes_neither(world: World) -> None:
    with pytest.raises(Unprocessable, match="is of job number 2, but j1 is 1"):
        apply_message(world, request("j1", 2), "3-0", NOW)
    assert not world.ledger.samples
    assert [world.jobs[job].audit.requested for job in ("j1", "j2")] == [0, 0]
    apply_message(world, request("j2", 2), "4-0", NOW)
    assert [world.jobs[job].audit.requested for job in ("j1", "j2")] == [0, 2]


def test_group_of_an_unknown_job_is_refused(world: World) -> None:
    with pytest.raises(Unprocessable, match="unknown job j3"):
        apply_message(world, request("j3", 3), "3-0", NOW)
