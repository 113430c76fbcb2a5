"""What workers are told to serve, and how to take new weights."""

from __future__ import annotations

import pytest

from services.rollout_manager.domain.actions import Send
from services.rollout_manager.domain.decide import decide
from services.rollout_manager.domain.intake import take
from services.rollout_manager.domain.world import Now, World
from shared.jobspec import parse, to_json
from shared.messages import InFlight, JobCommand, JobReport, UseVersion, WeightsCommitted, WorkerBeat, WorkerJoined

NOW = Now(mono=1.0, wall=1000.0)


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "finish"])
def test_a_worker_hears_with_each_version_what_becomes_of_the_samples_that_run(in_flight: InFlight) -> None:
    raw = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 9}
    spec = parse({**raw, "elastic": {"max_staleness": 2, "in_flight": in_flight}})
    world = World(lease_s=2.0)
    create = JobCommand(command_id="c", action="create", job_id="j", job_no=1, spec_json=to_json(spec))
    joined = WorkerJoined(
        worker="w", role="preemptible", kind="k", slots=4, host="h", pid=1, price_per_hour=0.0, at=0.0
    )
    beat = WorkerBeat(
        worker="w", state="joining", job_id="", version=-1, running=0, pending=0, tokens_per_s=0.0, at=0.0
    )
    for number, message in enumerate([create, JobReport(job_id="j", state="running", step=0), joined, beat]):
        take(world, message, f"{number + 1}-0", NOW)
    for version in range(2):
        committed = WeightsCommitted(job_id="j", version=version, manifest_digest="d", n_bytes=1, at=0.0)
        take(world, committed, f"9-{version}", NOW)
        decide(world, NOW, [])
        told = [action.message for action in world.take_actions() if isinstance(action, Send)]
        assert told == [UseVersion(job_id="j", version=version, in_flight=in_flight)]
