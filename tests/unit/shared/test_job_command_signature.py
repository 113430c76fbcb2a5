"""A trainer executes only the commands that a manager has signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost.shared.errors import Undecodable
from rlboost.shared.http.access import is_signed, signed
from rlboost.shared.job.spec import to_json
from rlboost.shared.messages import DeadLetter, JobCommand
from rlboost.shared.messages.codec import decode, encode
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB, TOKEN, Rig, spec

COMMAND = JobCommand(command_id="c", action="create", job_id="job-1", job_no=1, spec_json="{}")
CHANGES: dict[str, object] = {"command_id": "d", "action": "cancel", "job_id": "job-2", "job_no": 2, "spec_json": "[]"}


@pytest.mark.parametrize("field", CHANGES)
def test_signature_covers_every_field(field: str) -> None:
    genuine = signed(COMMAND, TOKEN)
    assert is_signed(genuine, TOKEN)
    assert not is_signed(genuine.model_copy(update={field: CHANGES[field]}), TOKEN)


def test_signature_needs_the_token() -> None:
    assert not is_signed(COMMAND, TOKEN)
    assert not is_signed(signed(COMMAND, "another"), TOKEN)
    assert not is_signed(signed(COMMAND, ""), "")


@pytest.mark.parametrize("job_id", ["/tmp/x", "../x", "a/b", ".x", "", "a" * 129, "a\n"])
def test_command_whose_job_id_is_a_path_does_not_decode(job_id: str) -> None:
    forged = COMMAND.model_copy(update={"job_id": job_id})
    with pytest.raises(Undecodable):
        decode(encode(forged))


async def dead_letters(rig: Rig, at_least: int = 0) -> list[DeadLetter]:
    entries = await rig.bus.read({names.DEAD_LETTERS: START})
    letters = [entry.message for entry in entries if isinstance(entry.message, DeadLetter)]
    return letters if len(letters) >= at_least else []


async def test_forged_create_is_dead_lettered_and_runs_nothing(tmp_path: Path) -> None:
    """The `XADD` of a client that can write to Redis and does not have the token."""
    rig = Rig(tmp_path)
    forged = JobCommand(command_id="f", action="create", job_id="forged", job_no=2, spec_json=to_json(spec()))
    async with rig.trainer():
        await rig.bus.append(names.JOB_COMMANDS, forged)
        await rig.bus.append(names.JOB_COMMANDS, signed(forged, "a guessed token"))
        await rig.command("create")
        assert (await rig.ended()).state == "completed"
        await eventually(lambda: dead_letters(rig, at_least=2))
    letters = await dead_letters(rig)
    assert {letter.stream for letter in letters} == {names.JOB_COMMANDS}
    assert "no manager has signed" in letters[0].reason
    assert {report.job_id for report in await rig.reports()} == {JOB}
    assert await rig.bus.claim(names.JOB_COMMANDS, names.TRAINER_GROUP, "x", min_idle_s=0) == []


async def test_forged_cancel_leaves_the_job_running(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    forged = JobCommand(command_id="f", action="cancel", job_id=JOB, job_no=1)
    async with rig.trainer():
        for stream in (names.JOB_COMMANDS, names.JOB_CONTROLS):
            await rig.bus.append(stream, forged)
        await rig.command("create")
        assert (await rig.ended()).state == "completed"
