from __future__ import annotations

import pytest

from rlboost.demo.run import FIRST_AT, LAST_AT, JobProgressEstimate, PreemptionSchedule, plan, plan_of_trace
from rlboost.report import PlannedChange
from rlboost.simulation.traces import FleetEvent, FleetTrace
from tests.support.synthetic_record import seen


@pytest.mark.parametrize("seed", range(20))
def test_full_demo_plans_three_kills_three_notices_and_six_joins(seed: int) -> None:
    actions = [change.action for change in plan(60, 3, seed)]
    assert actions.count("kill") == actions.count("notice") == 3
    assert actions.count("join") == 6


def test_full_demo_preempts_all_spot_workers_at_one_step() -> None:
    preemptions = [change.at_step for change in plan(60, 3, 0) if change.action != "join"]
    assert max(preemptions.count(at) for at in preemptions) == 3


@pytest.mark.parametrize("steps", [3, 8, 20])
def test_a_short_run_has_one_preemption_of_each_kind(steps: int) -> None:
    assert sorted(change.action for change in plan(steps, 3, 0)) == ["join", "join", "kill", "notice"]


@pytest.mark.parametrize("steps", [3, 8, 60, 200])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_everything_happens_in_order_while_the_job_runs(steps: int, workers: int) -> None:
    planned = plan(steps, workers, 1)
    assert planned == sorted(planned, key=lambda change: change.at_step)
    preemptions = [change.at_step for change in planned if change.action != "join"]
    assert int(FIRST_AT * steps) <= preemptions[0]
    assert preemptions[-1] < LAST_AT * steps
    joins = [change.at_step for change in planned if change.action == "join"]
    assert len(joins) == len(preemptions)
    assert all(join > preemption for join, preemption in zip(joins, preemptions, strict=True))
    assert joins[-1] < steps


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert plan(60, 3, 5) == plan(60, 3, 5) != plan(60, 3, 6)


def test_without_workers_there_is_nothing_to_take() -> None:
    assert plan(60, 0, 0) == []


def test_trace_is_compressed_into_the_job() -> None:
    events = [
        FleetEvent(0.0, "add", "a"),
        FleetEvent(0.0, "add", "b"),
        FleetEvent(3600.0, "remove", "b"),
        FleetEvent(7200.0, "remove", "a"),
        FleetEvent(7200.0, "add", "c"),
        FleetEvent(7200.0, "remove", "c"),
        FleetEvent(7200.0, "add", "d"),
    ]
    initial, planned = plan_of_trace(FleetTrace(tuple(events), 7200.0), steps=100)
    assert initial == 2
    assert [(change.action, change.at_step) for change in planned] == [
        ("kill", 50 * LAST_AT),
        ("kill", 100 * LAST_AT),
        ("join", 100 * LAST_AT),
    ]


def changes(*planned: tuple[float, str]) -> list[PlannedChange]:
    return [PlannedChange.model_validate({"at_step": at, "action": action}) for at, action in planned]


def test_a_preemption_strikes_only_workers_that_generate() -> None:
    schedule = PreemptionSchedule(changes((1.5, "kill")), seed=0)
    fleet = [
        seen("reserved-1", 0),
        seen("worker-1", 0, state="pulling"),
        seen("worker-2", 0, running=0),
        seen("worker-3", 0),
    ]
    assert schedule.due(1.4, fleet) == []
    (change,) = schedule.due(1.6, fleet)
    assert (change.planned.action, change.process) == ("kill", "worker-3")
    assert schedule.due(1.7, fleet) == []


def test_preemption_without_a_worker_is_deferred_and_joins_are_not() -> None:
    schedule = PreemptionSchedule(changes((1, "kill"), (2, "notice"), (2.5, "join")), seed=0)
    assert [change.planned.action for change in schedule.due(3, [])] == ["join"]
    assert [change.planned.action for change in schedule.due(3.1, [seen("worker-1", 0)])] == ["kill"]
    assert schedule.due(3.2, [seen("worker-1", 0)]) == []  # it is gone, although it is still listed
    assert [change.process for change in schedule.due(3.3, [seen("worker-2", 0)])] == ["worker-2"]


def test_preemptions_due_together_strike_different_workers() -> None:
    schedule = PreemptionSchedule(changes(*[(1, "kill")] * 3), seed=0)
    preempted = [change.process for change in schedule.due(1, [seen(f"worker-{i}", 0) for i in range(3)])]
    assert sorted(preempted) == ["worker-0", "worker-1", "worker-2"]


def test_progress_within_a_step_follows_the_length_of_the_last_one() -> None:
    progress = JobProgressEstimate()
    assert progress.at(0, now=100) == 0
    assert progress.at(1, now=110) == 1
    assert progress.at(1, now=115) == pytest.approx(1.5)
    assert progress.at(1, now=500) == pytest.approx(1.95)
    assert progress.at(3, now=510) == 3
