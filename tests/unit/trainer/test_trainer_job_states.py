"""Which job a trainer takes, and what users want of it: a fold over the commands."""

from __future__ import annotations

from typing import Any

from rlboost.services.trainer.domain.job_states import TAKEOVER_CHECKS, JobStates
from rlboost.shared.messages import JobCommand


def command(action: Any, job_id: str = "j") -> JobCommand:
    return JobCommand(command_id=action, action=action, job_id=job_id, job_no=1)


def table(*actions: str) -> JobStates:
    found = JobStates("t1")
    for number, action in enumerate(actions):
        found.apply(f"{number}-0", command(action))
    return found


def test_pause_lasts_until_a_resume() -> None:
    assert not table("create").is_paused("j")
    assert table("create", "pause").is_paused("j")
    assert not table("create", "pause", "pause", "resume").is_paused("j")
    assert not table("create", "pause").is_paused("another")


def test_a_cancel_is_for_good() -> None:
    assert table("create", "cancel", "resume").is_cancelled("j")
    assert not table("create", "cancel").is_cancelled("another")


def test_repeated_create_command_creates_one_job() -> None:
    found = table("create", "create")
    assert found.creates("0-0", command("create"))
    assert not found.creates("1-0", command("create"))
    assert not found.creates("0-0", command("pause"))


def test_trainer_may_take_over_its_own_job_at_once() -> None:
    assert table().may_take_over("j", "t1", held=False)
    assert table().may_take_over("j", "t1", held=True), "by its predecessor, whose lease will run out"


def test_another_trainers_job_is_taken_only_after_a_while_without_a_lease() -> None:
    found = table()
    checks = [found.may_take_over("j", "t2", held=False) for _ in range(TAKEOVER_CHECKS)]
    assert checks == [False] * (TAKEOVER_CHECKS - 1) + [True]


def test_a_trainer_that_holds_its_lease_again_keeps_its_job() -> None:
    found = table()
    for _ in range(TAKEOVER_CHECKS - 1):
        found.may_take_over("j", "t2", held=False)
    assert not found.may_take_over("j", "t2", held=True)
    assert not found.may_take_over("j", "t2", held=False)


def test_job_without_a_known_owner_is_not_taken_over_at_once() -> None:
    assert not table().may_take_over("j", None, held=False)
