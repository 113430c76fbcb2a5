"""Which job a trainer takes, and what users want of it: a fold over the commands."""

from __future__ import annotations

from typing import Any

from services.trainer.domain.board import ORPHAN_LOOKS, Board
from shared.messages import JobCommand


def command(action: Any, job_id: str = "j") -> JobCommand:
    return JobCommand(command_id=action, action=action, job_id=job_id, job_no=1)


def board(*actions: str) -> Board:
    found = Board("t1")
    for number, action in enumerate(actions):
        found.note(f"{number}-0", command(action))
    return found


def test_a_pause_stands_until_a_resume_whoever_reads_them() -> None:
    assert not board("create").paused("j")
    assert board("create", "pause").paused("j")
    assert not board("create", "pause", "pause", "resume").paused("j")
    assert not board("create", "pause").paused("another")


def test_a_cancel_is_for_good() -> None:
    assert board("create", "cancel", "resume").cancelled("j")
    assert not board("create", "cancel").cancelled("another")


def test_a_job_is_created_once_however_often_the_command_comes() -> None:
    found = board("create", "create")
    assert found.creates("0-0", command("create"))
    assert not found.creates("1-0", command("create"))
    assert not found.creates("0-0", command("pause"))


def test_a_trainer_goes_on_with_its_own_job_at_once() -> None:
    assert board().may_take_over("j", "t1", held=False)
    assert board().may_take_over("j", "t1", held=True), "by its predecessor, whose lease will run out"


def test_another_trainers_job_is_taken_only_after_a_while_without_a_lease() -> None:
    found = board()
    looks = [found.may_take_over("j", "t2", held=False) for _ in range(ORPHAN_LOOKS)]
    assert looks == [False] * (ORPHAN_LOOKS - 1) + [True]


def test_a_trainer_that_holds_its_lease_again_keeps_its_job() -> None:
    found = board()
    for _ in range(ORPHAN_LOOKS - 1):
        found.may_take_over("j", "t2", held=False)
    assert not found.may_take_over("j", "t2", held=True)
    assert not found.may_take_over("j", "t2", held=False)


def test_a_job_of_which_nobody_says_who_took_it_is_given_time_too() -> None:
    assert not board().may_take_over("j", None, held=False)
