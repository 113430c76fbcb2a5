"""A job that kills its trainer fails after a few deaths; trainers that die for other reasons do not fail it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost.services.trainer.app import Timing
from rlboost.services.trainer.domain.job_states import MAX_DEATHS, Attempts
from rlboost.shared.streams import names
from rlboost.shared.variables import KILLED_ON_REQUEST
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB, Rig

QUICK = Timing(block_s=0.01, takeover_check_s=0.02, lease_renewal_interval_s=0.02)
SEGFAULT = "killed by SIGSEGV"


async def dies_waiting_for(rig: Rig, step: int, last_exit: str, *, killed: bool = True, name: str = "t") -> None:
    """Run a trainer until the job waits for samples of a step, and end it."""
    rig.manager.held = {step}
    async with rig.trainer(killed=killed, last_exit=last_exit, name=name):
        await rig.waits_for(f"samples of step {step + 1}")

        async def counted() -> bool:
            return (await attempts(rig)).step >= step

        assert await eventually(counted)
    rig.manager.held = set()
    rig.lease_runs_out()


async def attempts(rig: Rig) -> Attempts:
    return Attempts.parse((await rig.bus.hash_all(names.JOB_ATTEMPTS)).get(JOB))


async def created(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path, timing=QUICK)
    await rig.command("create")
    return rig


async def test_job_whose_trainer_dies_without_a_step_fails_with_the_cause(tmp_path: Path) -> None:
    rig = await created(tmp_path)
    for n in range(MAX_DEATHS):
        await dies_waiting_for(rig, 0, SEGFAULT if n else "")
    async with rig.trainer(last_exit="killed by SIGKILL"):
        ended = await rig.ended()
    assert ended.state == "failed"
    assert ended.error.startswith(
        "its trainer died 3 times without a finished step in between: killed by SIGSEGV, killed by SIGKILL (out of "
        "memory?). The trainer's log has its last lines"
    )
    assert await rig.bus.hash_all(names.JOB_ATTEMPTS) == {}


async def test_repeated_steps_are_no_progress(tmp_path: Path) -> None:
    """After each death the trainer repeats the steps since the checkpoint, and dies again in the same one."""
    rig = await created(tmp_path)
    for _ in range(MAX_DEATHS):
        await dies_waiting_for(rig, 1, "")
    ended = await rig.resume()
    assert (ended.state, ended.step) == ("failed", 1)
    assert "died 3 times without a finished step in between: of an unknown cause." in ended.error


async def test_trainer_that_dies_after_each_new_step_completes_its_job(tmp_path: Path) -> None:
    rig = await created(tmp_path)
    for step in range(4):
        await dies_waiting_for(rig, step, SEGFAULT)
    async with rig.trainer(last_exit=SEGFAULT):
        assert (await rig.ended()).state == "completed"


@pytest.mark.parametrize(("killed", "last_exit"), [(False, SEGFAULT), (True, KILLED_ON_REQUEST)])
async def test_stops_and_requested_kills_do_not_count(tmp_path: Path, killed: bool, last_exit: str) -> None:
    rig = await created(tmp_path)
    for _ in range(MAX_DEATHS + 1):
        await dies_waiting_for(rig, 0, last_exit, killed=killed)
    async with rig.trainer(last_exit=last_exit):
        assert (await rig.ended()).state == "completed"


async def test_death_while_the_job_is_paused_does_not_count(tmp_path: Path) -> None:
    rig = await created(tmp_path)
    await rig.command("pause")

    async def is_noted() -> bool:
        return await rig.states() != [] and (await attempts(rig)).trainer == ""

    for _ in range(MAX_DEATHS + 1):
        async with rig.trainer(killed=True, last_exit="killed by SIGKILL"):
            await rig.waits_for("a resume")
            assert await eventually(is_noted)
        rig.lease_runs_out()
    await rig.command("resume")
    assert (await rig.resume()).state == "completed"


def test_cause_of_another_trainers_death_is_unknown() -> None:
    found = Attempts().started("a", "").started("b", SEGFAULT).started("b", SEGFAULT)
    assert found.deaths == ("", SEGFAULT)
    assert found.started("b", None).deaths == found.deaths
    assert Attempts.parse(found.to_json()) == found
    assert Attempts.parse("[]") == Attempts.parse("garbage") == Attempts.parse(None) == Attempts()
