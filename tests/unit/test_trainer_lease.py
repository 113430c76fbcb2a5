"""Whose a job is: the lease is taken in one step, and a trainer that was succeeded says nothing more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.trainer import app
from services.trainer.fakes import FakeEngine
from shared import names
from shared.bus import Fence, HashSet
from shared.errors import ConfigError, Conflict
from shared.messages import JobReport
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB, Rig

LEASE, EPOCH = names.trainer_lease(JOB), names.trainer_epoch(JOB)


async def test_a_trainer_that_finds_itself_succeeded_drops_the_job_without_a_word(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {2}
    async with rig.trainer(name="first"):
        await rig.command("create")
        await rig.waits_for("samples of step 2")
        # It was paused for longer than its lease, and another has it now.
        await another_takes_it(rig)
        assert await eventually(lambda: rig.engine.closed)
        rig.manager.held = set()
        await asyncio.sleep(0.2)
        assert await rig.bus.holders([LEASE]) == ["another's"]
    assert await rig.states() == ["running"]
    assert max(rig.weights.versions) == 2
    assert await rig.bus.holders([LEASE]) == ["another's"], "a stop, too, leaves it alone"
    assert len(await rig.bus.claim(names.JOB_COMMANDS, names.TRAINER_GROUP, "x", min_idle_s=0)) == 1, "still to be done"


async def another_takes_it(rig: Rig) -> None:
    rig.lease_runs_out()
    epoch = await rig.bus.take(LEASE, "another's", 60.0, epoch=EPOCH, instead_of=None)
    assert epoch is not None
    await rig.bus.transact([HashSet(names.JOB_TRAINERS, {JOB: "another"})], Fence(EPOCH, epoch))


async def test_a_superseded_trainer_takes_the_next_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 2")
        await another_takes_it(rig)
        assert await eventually(lambda: rig.engine.closed)
        rig.manager.held = set()
        await rig.command("create", job_id="the next")

        async def begun() -> bool:
            return "the next" in {report.job_id for report in await rig.reports()}

        assert await eventually(begun)


async def test_a_trainer_of_the_same_name_that_waited_until_the_job_was_done_does_not_do_it_again(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 2")
        first = rig.engine
        async with rig.trainer():
            await rig.waits_for("the lease of the job")
            assert rig.engine is not first
            rig.manager.held = set()
            assert await eventually(lambda: first.closed and rig.engine.closed)
            assert await rig.bus.holders([LEASE]) == [None]
    assert await rig.states() == ["running", "running", "completed"]
    assert [report.step for report in await rig.steps()] == [0, 1, 2, 3, 4]


async def test_a_trainer_that_cannot_build_a_job_that_another_has_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LEASE_LIMIT_S", 0.3)
    rig = Rig(tmp_path)
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 2")

        def refuse() -> FakeEngine:
            raise ConfigError("model: 'm' is no directory here")

        rig.make_engine = refuse
        async with rig.trainer():
            await rig.waits_for("the lease of the job")
        rig.manager.held = set()
        assert (await rig.ended()).state == "completed"
    assert "failed" not in await rig.states()


async def test_a_lease_that_ran_out_and_that_nobody_took_is_renewed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {2}
    async with rig.trainer():
        await rig.command("create")
        await rig.waits_for("samples of step 2")
        rig.lease_runs_out()
        assert await eventually(lambda: _held(rig))
        rig.manager.held = set()
        assert (await rig.ended()).state == "completed"


async def _held(rig: Rig) -> bool:
    return (await rig.bus.holders([LEASE]))[0] is not None


async def test_a_taking_whose_answer_was_lost_is_this_trainers(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.command("create")
    take = rig.bus.take
    lost: list[int | None] = []

    async def losing(*args: str, **kwargs: object) -> int | None:
        rig.bus.lose_next_reply = not lost
        lost.append(1)
        return await take(*args, **kwargs)  # type: ignore[arg-type]

    rig.bus.take = losing  # type: ignore[assignment, method-assign]
    async with rig.trainer():
        assert (await rig.ended()).state == "completed"
    assert len(lost) == 2


async def test_an_ended_job_leaves_neither_lease_nor_epoch(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.trainer():
        await rig.command("create")
        await rig.ended()
        assert await rig.bus.holders([LEASE]) == [None]
    assert EPOCH not in rig.bus._counters


async def test_weights_that_somebody_else_committed_meanwhile_are_for_the_next_process(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.manager.held = {1}

    async def until_another_commits() -> None:
        async with rig.trainer():
            await rig.command("create")
            await rig.waits_for("samples of step 1")
            rig.weights.versions[2] = rig.weights.versions[1]
            rig.manager.held = set()
            await eventually(lambda: rig.engine.closed)

    with pytest.raises(Conflict, match="the head is 2, not 1"):
        await until_another_commits()
    assert not {"failed", "completed"} & {r.state for r in await rig.reports() if isinstance(r, JobReport)}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LEASE_EVERY_S", 0.02)
    monkeypatch.setattr(app, "_LOOK_EVERY_S", 0.02)
