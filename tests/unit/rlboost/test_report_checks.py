from __future__ import annotations

from typing import Any

import pytest

from rlboost.report import Record, checks
from tests.support.synthetic_record import AUDIT, STEPS, record, row, unfinished


def broken(made: Record) -> list[str]:
    return [check.guarantee for check in checks(made) if not check.held]


def test_a_good_run_keeps_every_promise() -> None:
    assert broken(record()) == []
    assert len(checks(record())) == 7


def test_an_unfinished_run_keeps_none_but_having_seen_no_duplicate() -> None:
    assert len(broken(unfinished())) == 6


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"delivered": 3275}, "Every sample was delivered"),
        ({"in_flight": 1, "delivered": 3275}, "Every sample was delivered"),
        ({"tokens_regenerated": {}}, "Every token is accounted for"),
        ({"preemptions": {"with_notice": 1}}, "Every scheduled preemption"),
        ({"preemptions": {"without_notice": 2}}, "Every scheduled preemption"),
    ],
)
def test_an_audit_that_does_not_balance_is_found(change: dict[str, Any], promise: str) -> None:
    (found,) = broken(record(audit=AUDIT | change))
    assert found.startswith(promise)


def test_a_sample_dropped_with_a_reason_is_not_a_loss() -> None:
    assert broken(record(audit=AUDIT | {"delivered": 3274, "dropped": {"failed 3 times": 2}})) == []


def test_a_duplicate_that_reached_the_trainer_is_found() -> None:
    steps = [row(step) for step in range(STEPS + 1)]
    steps[3]["samples/duplicates"] = 1.0
    assert broken(record(steps=steps)) == ["No sample was delivered twice"]


def test_a_preemption_that_did_not_take_place_is_found() -> None:
    made = record()
    made.changes = [change for change in made.changes if change.action != "notice"]
    assert broken(made) == ["Every scheduled preemption took place, and was noticed"]


def test_a_join_that_did_not_take_place_is_found() -> None:
    made = record()
    made.changes.pop()
    assert broken(made) == ["Every scheduled join took place"]


def test_a_failed_job_is_named_with_its_error() -> None:
    (check, *_) = checks(record(job={"state": "failed", "error": "no worker came"}))
    assert (check.held, check.detail) == (False, "failed: no worker came")


def test_a_full_run_must_reach_its_goal_and_a_short_one_must_rise() -> None:
    made = record()
    made.settings.goal = 0.9
    assert broken(made) == ["Held-out accuracy rose to 90% or more"]
    made.settings.goal = None
    assert broken(made) == []
    made.steps[-1]["eval/reward_mean"] = made.steps[0]["eval/reward_mean"]
    assert broken(made) == ["Held-out accuracy rose"]


def test_a_run_of_a_few_steps_promises_no_accuracy_and_a_quiet_one_no_preemption() -> None:
    made = record()
    made.settings.steps = 3
    made.settings.chaos = False
    guarantees = [check.guarantee for check in checks(made)]
    assert not any("accuracy" in promise or "scheduled" in promise for promise in guarantees)
