"""A job that a trainer cannot read stays as it is, for one that can; the trainer goes on with the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.app import Timing
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.spec import JobSpec, to_json
from rlboost.shared.messages import Event, JobCommand, JobReport
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB, Rig

LATER = "later"


async def create_of_a_later_version(rig: Rig) -> None:
    text = json.dumps({**json.loads(to_json(rig.job)), "invented_later": 1})
    await rig.append(JobCommand(command_id="c", action="create", job_id=LATER, job_no=2, spec_json=text))


async def states_of(rig: Rig, job_id: str) -> list[str]:
    return [report.state for report in await rig.reports() if isinstance(report, JobReport) and report.job_id == job_id]


async def was_told(rig: Rig) -> list[Event]:
    entries = await rig.bus.read({names.job_events(LATER): START})
    return [entry.message for entry in entries if isinstance(entry.message, Event)]


async def left_over(rig: Rig) -> list[str]:
    """The jobs whose command is pending."""
    pending = await rig.bus.claim(names.JOB_COMMANDS, names.TRAINER_GROUP, "x", min_idle_s=0)
    return [entry.message.job_id for entry, _ in pending if isinstance(entry.message, JobCommand)]


async def test_a_job_that_a_trainer_cannot_read_is_done_by_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, timing=Timing(block_s=0.01, takeover_check_s=0.01, lease_renewal_interval_s=0.05))
    async with rig.trainer(name="older"):
        await create_of_a_later_version(rig)
        await rig.command("create")
        await rig.ended()
        assert await states_of(rig, JOB) == ["running", "completed"]
        assert await states_of(rig, LATER) == []
        (event,) = await was_told(rig)
        assert event.kind == "job_quarantined"
        assert "cannot parse the job file (invented_later: unknown key" in event.fields["reason"]
        assert "start the version of rlboost that wrote it" in event.fields["reason"]
    assert await left_over(rig) == [LATER]
    assert await rig.bus.lease_values([names.trainer_lease(LATER)]) == [None]

    def newer(raw: Any) -> JobSpec:
        return job_spec.parse({name: value for name, value in raw.items() if name != "invented_later"})

    monkeypatch.setattr("rlboost.services.trainer.job.job.parse_stored", newer)
    async with rig.trainer(name="newer"):
        await eventually(lambda: states_of(rig, LATER))
    assert (await states_of(rig, LATER))[0] == "running"


async def test_quarantined_job_can_be_cancelled(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timing=Timing(block_s=0.01, takeover_check_s=0.01, lease_renewal_interval_s=0.05))
    async with rig.trainer():
        await create_of_a_later_version(rig)
        await eventually(lambda: was_told(rig))
        await rig.command("cancel", job_id=LATER)

        async def nothing_left() -> bool:
            return not await left_over(rig)

        await eventually(nothing_left)
