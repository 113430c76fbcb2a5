"""Several trainers on one stream of commands: each job has one of them, and what users want reaches that one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost.services.trainer.app import Timing
from rlboost.shared.messages import JobReport
from rlboost.shared.streams import names
from tests.support.eventually import eventually
from tests.support.trainer_rig import Rig


async def runners(rig: Rig) -> list[str]:
    return [report.trainer for report in await rig.reports() if isinstance(report, JobReport)]


async def last_state(rig: Rig) -> str:
    states = await rig.states()
    return states[-1] if states else ""


async def until_last_state(rig: Rig, state: str) -> None:
    async def there() -> bool:
        return await last_state(rig) == state

    await eventually(there)


async def test_a_pause_and_a_resume_reach_the_trainer_that_has_the_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {2}
    async with rig.trainer(name="first"):
        await rig.command("create")
        await eventually(lambda: 2 in rig.weights.versions)
        async with rig.trainer(name="second"):
            await rig.command("pause")
            rig.manager.held = set()
            await until_last_state(rig, "paused")
            await rig.command("resume")
            assert (await rig.ended()).state == "completed"
    assert set(await runners(rig)) == {"first"}
    assert [report.step for report in await rig.steps()] == list(range(5))


async def test_a_cancel_reaches_the_trainer_that_has_the_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {1}
    async with rig.trainer(name="first"):
        await rig.command("create")
        await eventually(lambda: 1 in rig.weights.versions)
        async with rig.trainer(name="second"):
            await rig.command("cancel")
            assert (await rig.ended()).state == "cancelled"
    assert set(await runners(rig)) == {"first"}


async def test_a_trainer_with_a_job_leaves_the_next_one_to_another(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {1}
    async with rig.trainer(name="first"):
        await rig.command("create")
        await eventually(lambda: 1 in rig.weights.versions)
        await rig.command("create", job_id="another")
        async with rig.trainer(name="second"):

            async def both() -> bool:
                return {report.job_id for report in await rig.reports()} == {"job-1", "another"}

            await eventually(both)
    by_job = {report.job_id: report.trainer for report in await rig.reports() if isinstance(report, JobReport)}
    assert by_job == {"job-1": "first", "another": "second"}


@pytest.mark.parametrize("successor", ["first", "second"])
async def test_job_of_a_killed_trainer_is_finished_by_it_or_by_another(tmp_path: Path, successor: str) -> None:
    rig = Rig(tmp_path, timing=Timing(block_s=0.01, takeover_check_s=0.01, lease_renewal_interval_s=0.05))
    rig.manager.held = {2}
    async with rig.trainer(name="first", killed=True):
        await rig.command("create")
        await eventually(lambda: 2 in rig.weights.versions)
    rig.lease_runs_out()
    rig.manager.held = set()
    async with rig.trainer(name=successor):
        report = await rig.ended()
    assert (report.state, report.trainer) == ("completed", successor)


async def test_a_command_that_was_written_twice_makes_one_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.command("create")
    await rig.command("create")
    async with rig.trainer():
        assert (await rig.ended()).state == "completed"
        await rig.command("create", job_id="next")
        await eventually(lambda: _has_begun(rig, "next"))
    assert [r.state for r in await rig.reports() if isinstance(r, JobReport) and r.job_id == "job-1"] == [
        "running",
        "completed",
    ]


async def _has_begun(rig: Rig, job_id: str) -> bool:
    return job_id in {report.job_id for report in await rig.reports()}


async def test_job_cancelled_in_the_queue_ends_without_a_trainer_and_delays_no_other(tmp_path: Path) -> None:
    """What a sweep that is given up leaves behind: no lease, no report of a run, no wait per job."""
    rig = Rig(tmp_path, timing=Timing(block_s=1.0))
    abandoned = [f"abandoned-{number}" for number in range(50)]
    for job_id in abandoned:
        await rig.command("create", job_id=job_id)
        await rig.command("pause", job_id=job_id)
        await rig.command("cancel", job_id=job_id)
    await rig.command("create")
    async with rig.trainer():
        await until_last_state(rig, "completed")
    reports = [report for report in await rig.reports() if isinstance(report, JobReport)]
    cancelled = [report for report in reports if report.job_id in abandoned]
    assert [(report.job_id, report.state, report.trainer) for report in cancelled] == [
        (job_id, "cancelled", "") for job_id in abandoned
    ]
    assert await rig.bus.claim(names.JOB_COMMANDS, names.TRAINER_GROUP, "x", min_idle_s=0) == []


async def test_commands_on_a_running_job_do_not_delay_the_next_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=Timing(block_s=1.0))
    for _ in range(500):
        await rig.command("resume", job_id="elsewhere")
    await rig.command("create")
    assert (await rig.resume()).state == "completed"
    assert await rig.bus.length(names.JOB_COMMANDS) == 1
