"""The lease of a job: one trainer holds it, and a superseded trainer reports nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlboost.services.trainer.app import Timing
from rlboost.shared.errors import ConfigError, Conflict
from rlboost.shared.messages import JobReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Fence, HashSet
from tests.support.eventually import eventually
from tests.support.trainer_fakes import FakeEngine
from tests.support.trainer_rig import JOB, PRICE_PER_HOUR, Rig, spec

QUICK = Timing(block_s=0.01, takeover_check_s=0.02, lease_renewal_interval_s=0.02)
LEASE, EPOCH = names.trainer_lease(JOB), names.trainer_epoch(JOB)


async def test_superseded_trainer_drops_its_job_without_a_report(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=QUICK)
    rig.manager.held = {2}
    async with rig.trainer(name="first"):
        await rig.command("create")
        await rig.waits_for("samples of step 3")
        # It was paused for longer than its lease, and another has it now.
        await another_takes_it(rig)
        assert await eventually(lambda: rig.engine.closed)
        rig.manager.held = set()
        await asyncio.sleep(0.2)
        assert await rig.bus.lease_values([LEASE]) == ["another's"]
    assert await rig.states() == ["running"]
    assert max(rig.weights.versions) == 2
    assert await rig.bus.lease_values([LEASE]) == ["another's"], "a stop, too, leaves it alone"
    assert len(await rig.bus.claim(names.JOB_COMMANDS, names.TRAINER_GROUP, "x", min_idle_s=0)) == 1, "still to be done"


async def test_trainer_that_is_fenced_before_its_next_renewal_drops_the_job(tmp_path: Path) -> None:
    """Its record of the next step's prompts is refused while it still believes that it holds the lease."""
    job = spec(data={"train": "t.jsonl", "prompts_per_step": 4, "curriculum": {"skip_solved_above": 1.0}})
    rig = Rig(tmp_path, job, timing=replace(QUICK, lease_renewal_interval_s=3600.0))
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 3")
        await another_takes_it(rig)
        rig.manager.held = set()
        assert await eventually(lambda: rig.engine.closed)
    assert await rig.states() == ["running"]


async def test_lease_tells_the_price_of_the_trainers_machines(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=QUICK)

    async def held() -> str:
        [body] = await rig.bus.lease_values([LEASE])
        return body or ""

    async with rig.trainer():
        await rig.command("create")
        assert json.loads(await eventually(held))["price_per_hour"] == PRICE_PER_HOUR


async def another_takes_it(rig: Rig) -> None:
    rig.lease_runs_out()
    epoch = await rig.bus.acquire_fenced(LEASE, "another's", 60.0, epoch=EPOCH, replacing=None)
    assert epoch is not None
    await rig.bus.transact([HashSet(names.JOB_TRAINERS, {JOB: "another"})], Fence(EPOCH, epoch))


async def test_superseded_trainer_takes_the_next_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=QUICK)
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 3")
        await another_takes_it(rig)
        assert await eventually(lambda: rig.engine.closed)
        rig.manager.held = set()
        await rig.command("create", job_id="next")

        async def begun() -> bool:
            return "next" in {report.job_id for report in await rig.reports()}

        assert await eventually(begun)


async def test_waiting_trainer_does_not_repeat_an_ended_job(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, timing=QUICK)
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 3")
        first = rig.engine
        async with rig.trainer():
            await rig.waits_for("the lease of the job")
            assert rig.engine is not first
            assert list(rig.folder.rows) == [0, 1], "what the other has logged is not cut"
            rig.manager.held = set()
            assert await eventually(lambda: first.closed and rig.engine.closed)
            assert await rig.bus.lease_values([LEASE]) == [None]
    assert await rig.states() == ["running", "running", "completed"]
    assert [report.step for report in await rig.steps()] == [0, 1, 2, 3, 4]


async def test_trainer_reports_no_failure_of_a_job_it_does_not_hold(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=replace(QUICK, lease_wait_limit_s=0.3))
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 3")

        def refuse() -> FakeEngine:
            raise ConfigError("model: 'm' is no directory here")

        rig.make_engine = refuse
        async with rig.trainer():
            await rig.waits_for("the lease of the job")
        rig.manager.held = set()
        assert (await rig.ended()).state == "completed"
    assert "failed" not in await rig.states()


async def test_expired_lease_is_renewed_if_it_is_still_free(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=QUICK)
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 3")
        rig.lease_runs_out()
        assert await eventually(lambda: _held(rig))
        rig.manager.held = set()
        assert (await rig.ended()).state == "completed"


async def _held(rig: Rig) -> bool:
    return (await rig.bus.lease_values([LEASE]))[0] is not None


async def test_lost_reply_of_a_lease_acquisition_is_retried(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=QUICK)
    await rig.command("create")
    take = rig.bus.acquire_fenced
    lost: list[int | None] = []

    async def losing(*args: str, **kwargs: object) -> int | None:
        rig.bus.lose_next_reply = not lost
        lost.append(1)
        return await take(*args, **kwargs)  # type: ignore[arg-type]

    rig.bus.acquire_fenced = losing  # type: ignore[assignment, method-assign]
    assert (await rig.resume()).state == "completed"
    assert len(lost) == 2


async def test_ended_job_leaves_neither_lease_nor_epoch(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=QUICK)
    async with rig.trainer():
        await rig.command("create")
        await rig.ended()
        assert await rig.bus.lease_values([LEASE]) == [None]
    assert EPOCH not in rig.bus._counters


async def test_conflicting_weights_end_the_process_without_a_report(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=QUICK)
    rig.manager.held = {1}

    async def until_another_commits() -> None:
        async with rig.trainer():
            await rig.command("create")
            await rig.waits_for("samples of step 2")
            rig.weights.versions[2] = rig.weights.versions[1]
            rig.manager.held = set()
            await eventually(lambda: f"job-{JOB}" not in [task.get_name() for task in asyncio.all_tasks()])

    with pytest.raises(Conflict, match="the head is 2, not 1"):
        await until_another_commits()
    assert not {"failed", "completed"} & {r.state for r in await rig.reports() if isinstance(r, JobReport)}
