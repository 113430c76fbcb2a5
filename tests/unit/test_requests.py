"""What the manager refuses of requests for samples."""

from __future__ import annotations

import pytest

from services.rollout_manager.domain.intake import take
from services.rollout_manager.domain.world import Now, World
from shared.columns import I32, pack
from shared.errors import Bury
from shared.ids import SampleId
from shared.jobspec import parse, to_json
from shared.messages import GroupRequested, JobCommand, Sampling

NOW = Now(mono=1.0, wall=1000.0)
RAW = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 9}


@pytest.fixture
def world() -> World:
    """Two jobs, number 1 and number 2."""
    world, spec_json = World(lease_s=2.0), to_json(parse(RAW))
    for number in (1, 2):
        create = JobCommand(
            command_id=f"c{number}", action="create", job_id=f"j{number}", job_no=number, spec_json=spec_json
        )
        take(world, create, f"{number}-0", NOW)
    return world


def request(job_id: str, number: int) -> GroupRequested:
    group = SampleId(number, False, 0, 0, 0).pack()
    return GroupRequested(
        job_id=job_id, group=group, n=2, prompt=pack([1], I32), sampling=Sampling(max_tokens=5), version=0, seed=1
    )


def test_a_group_that_lies_about_its_job_is_put_aside_and_touches_neither(world: World) -> None:
    with pytest.raises(Bury, match="is of job number 2, but j1 is 1"):
        take(world, request("j1", 2), "3-0", NOW)
    assert not world.ledger.samples
    assert [world.audits[job].requested for job in ("j1", "j2")] == [0, 0]
    take(world, request("j2", 2), "4-0", NOW)
    assert [world.audits[job].requested for job in ("j1", "j2")] == [0, 2]


def test_a_group_of_an_unknown_job_is_put_aside(world: World) -> None:
    with pytest.raises(Bury, match="unknown job j3"):
        take(world, request("j3", 3), "3-0", NOW)
