"""Commands that clients repeat, and metrics that are no numbers: neither harms the job."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

import pytest

from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.messages import JobCommand, JobReport, StepReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Append, Fence, Op
from tests.support.jobs import job_file
from tests.support.manager_rig import ManagerRig


class System(ManagerRig):
    """Shows the commands that the manager writes."""

    async def act(self, action: str) -> None:
        (await self.http.post(f"/jobs/{self.job}/{action}")).raise_for_status()

    async def actions(self) -> list[str]:
        entries = await self.bus.read({names.JOB_CONTROLS: START})
        return [entry.message.action for entry in entries if isinstance(entry.message, JobCommand)]


@pytest.fixture
async def system() -> AsyncIterator[System]:
    system = System()
    await system.start()
    await system.report("running")
    yield system
    await system.http.aclose()


async def test_job_created_while_a_turn_waits_is_there_when_the_client_is_answered(system: System) -> None:
    """The command ends the turn's wait for an entry, and the turn adds the job."""
    turn = asyncio.create_task(system.manager.turn(block_s=60.0))
    await asyncio.sleep(0)
    answer = await system.http.post("/jobs", json=job_file())
    assert turn.done()
    created = answer.json()
    assert (answer.status_code, created["state"]) == (201, "pending")
    shown = {job["id"]: job["state"] for job in (await system.http.get("/jobs")).json()}
    assert shown == {system.job: "running", created["id"]: "pending"}
    (await system.http.post(f"/jobs/{created['id']}/cancel")).raise_for_status()
    await turn
    await system.manager.turn()
    assert (await system.http.get(f"/jobs/{created['id']}")).json()["state"] == "cancelled"


async def test_follower_gets_the_end_that_is_decided_but_not_written(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    transact, decided, released = system.bus.transact, asyncio.Event(), asyncio.Event()

    async def held(ops: Sequence[Op], fence: Fence | None = None) -> None:
        if any(isinstance(op, Append) and op.stream == names.job_events(system.job) for op in ops):
            decided.set()
            await released.wait()
        await transact(ops, fence)

    monkeypatch.setattr(system.bus, "transact", held)
    await system.bus.append(names.JOB_REPORTS, JobReport(job_id=system.job, state="completed", step=1))
    async with asyncio.TaskGroup() as group:
        group.create_task(system.manager.turn(), name="turn")
        await decided.wait()
        following = group.create_task(system.http.get(f"/jobs/{system.job}/events"), name="follower")
        await asyncio.sleep(0.1)
        released.set()
    assert '"state":"completed"' in following.result().text


async def test_job_created_between_two_turns_survives_a_new_leader(system: System) -> None:
    created = (await system.http.post("/jobs", json=job_file())).json()["id"]
    await system.manager._leadership.resign()
    successor = Manager(system.bus, lease_s=1.0, redis_limit_s=1.0)
    assert await successor.try_lead()
    assert set(successor.world.jobs) == {system.job, created}
    await successor.turn()
    assert [job.id for job in successor.world.jobs.active()] == [system.job, created]


async def test_repeated_command_is_written_once(system: System) -> None:
    for action in ("resume", "pause", "pause", "resume"):
        for _ in range(20):
            await system.act(action)
            await system.manager.turn()
    assert await system.actions() == ["resume", "pause", "resume"]


async def test_command_that_another_leader_has_undone_is_written_again(system: System) -> None:
    await system.act("pause")
    await system.manager.turn()
    undone = JobCommand(command_id="by another leader", action="resume", job_id=system.job, job_no=1)
    await system.bus.append(names.JOB_CONTROLS, undone)
    await system.manager._leadership.resign()
    assert await system.manager.try_lead()
    await system.manager.turn()
    await system.act("pause")
    assert await system.actions() == ["pause", "resume", "pause"]


async def test_paused_job_that_no_trainer_has_taken_says_so(system: System) -> None:
    job_id = (await system.http.post("/jobs", json=job_file())).json()["id"]
    (await system.http.post(f"/jobs/{job_id}/pause")).raise_for_status()
    await system.manager.turn()
    shown = (await system.http.get(f"/jobs/{job_id}")).json()
    assert (shown["state"], shown["waiting"]["for"]) == ("pending", "a resume")
    assert "before a trainer took it" in shown["waiting"]["because"]


async def test_metrics_that_are_no_numbers_are_left_out_and_the_job_survives_a_restart(system: System) -> None:
    metrics = {"loss": math.nan, "grad_norm": math.inf, "reward/mean": 0.5}
    report = StepReport(job_id=system.job, step=0, metrics=metrics, wait_s=1.0, train_s=1.0)
    await system.bus.append(names.JOB_REPORTS, report)
    await system.manager.turn()
    (row,) = (await system.http.get(f"/jobs/{system.job}/metrics")).json()
    assert row == {"step": 0, "reward/mean": 0.5}
    successor = Manager(system.bus, lease_s=1.0, redis_limit_s=1.0)
    await system.manager._leadership.resign()
    assert await successor.try_lead()
    assert successor.world.jobs[system.job].record.latest == {"reward/mean": 0.5}


async def test_profile_is_asked_of_a_job_that_is_trained(system: System) -> None:
    path = f"/jobs/{system.job}/profile"
    answer = await system.http.post(path, json={"steps": 2})
    assert (answer.status_code, answer.json()) == (202, {"id": system.job, "state": "running", "steps": 2})
    assert await system.bus.hash_all(names.job_profile(system.job)) == {"steps": "2"}
    assert (await system.http.post(path)).json()["steps"] == 1
    for steps in (0, 11, "many"):
        refused = await system.http.post(path, json={"steps": steps})
        assert (refused.status_code, "steps" in refused.text) == (422, True)
    assert await system.actions() == [], "no command on the job's state"
    await system.report("completed")
    refused = await system.http.post(path)
    assert (refused.status_code, "is completed: the trainer service trains nothing" in refused.text) == (409, True)
