from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain import money as charging
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import Audit, Job
from rlboost.services.rollout_manager.domain.money import charge_jobs, cost_report
from rlboost.services.rollout_manager.domain.world import World
from tests.support.builders import job_spec, trainer_status, worker_joined

HOUR_S = 3600.0


@pytest.fixture
def world() -> World:
    world = World(lease_s=2.0)
    for no, job_id in enumerate(("a", "b"), start=1):
        world.jobs.add(Job(job_id, no, job_spec(), created_at=0.0, state="running"))
    for name, role, price, job_id in (("spot", "preemptible", 2.0, "a"), ("own", "reserved", 8.0, "b")):
        worker = world.fleet.join(worker_joined(name, role=role, price_per_hour=price), now=0.0)
        assert worker
        worker.assigned_version = (job_id, 0)
    return world


def charge(world: World, *times: tuple[float, float]) -> None:
    for mono, wall in times:
        charge_jobs(world.jobs, world.fleet, world.periodic, Now(mono, wall))


def test_each_job_is_charged_with_the_time_of_its_own_workers(world: World) -> None:
    charge(world, (0.0, 100.0), (HOUR_S / 2, 100.0 + HOUR_S / 2), (HOUR_S, 100.0 + HOUR_S))
    assert world.jobs["a"].audit.cost.dollars == pytest.approx(2.0)
    assert world.jobs["b"].audit.cost.dollars == pytest.approx(8.0)


def test_worker_that_serves_no_job_or_is_gone_costs_no_job(world: World) -> None:
    world.fleet.join(worker_joined("idle", price_per_hour=50.0), now=0.0)
    charge(world, (0.0, 100.0), (HOUR_S, 100.0 + HOUR_S))
    world.fleet.remove(world.fleet.workers["spot"], "lost", "its lease ran out")
    charge(world, (2 * HOUR_S, 100.0 + 2 * HOUR_S))
    assert world.jobs["a"].audit.cost.dollars == pytest.approx(2.0)


@pytest.mark.parametrize(("own", "charged"), [(0.0, 3.0), (5.0, 5.0)])
def test_worker_without_a_price_costs_what_its_kind_does(own: float, charged: float) -> None:
    world = World(2.0, {"k": 3.0})
    world.jobs.add(Job("a", 1, job_spec(), created_at=0.0, state="running"))
    worker = world.fleet.join(worker_joined("spot", price_per_hour=own), now=0.0)
    assert worker
    worker.assigned_version = ("a", 0)
    charge(world, (0.0, 100.0), (HOUR_S, 100.0 + HOUR_S))
    assert world.jobs["a"].audit.cost.dollars == pytest.approx(charged)


def test_trainer_is_charged_while_it_holds_the_lease(world: World) -> None:
    charge(world, (0.0, 100.0))
    world.jobs["a"].progress.on_trainer_status(trainer_status(price_per_hour=6.0), 100.0)
    charge(world, (HOUR_S / 2, 100.0 + HOUR_S / 2))
    world.jobs["a"].progress.on_trainer_status(None, 100.0)
    charge(world, (HOUR_S, 100.0 + HOUR_S))
    assert cost_report(world.jobs["a"].audit, steps=1, max_dollars=None)["workers"] == [
        {"role": "preemptible", "kind": "k", "hours": 1.0, "dollars": 2.0},
        {"role": "trainer", "kind": "", "hours": 0.5, "dollars": 3.0},
    ]
    assert world.jobs["b"].audit.cost.dollars == pytest.approx(8.0)


def test_trainer_without_a_price_is_not_in_the_report(world: World) -> None:
    world.jobs["a"].progress.on_trainer_status(trainer_status(), 100.0)
    charge(world, (0.0, 100.0), (HOUR_S, 100.0 + HOUR_S))
    assert [time.role for time in world.jobs["a"].audit.cost.workers.values()] == ["preemptible"]


def test_next_manager_charges_the_time_without_a_leader(world: World) -> None:
    charge(world, (0.0, 100.0), (10.0, 110.0))
    world.periodic.charged_at = None
    charge(world, (5.0, 110.0 + HOUR_S))
    assert world.jobs["a"].audit.cost.dollars == pytest.approx(2.0 * (10.0 + HOUR_S) / HOUR_S)


@pytest.mark.parametrize("wall", [100.0 - HOUR_S, 100.0 + 24 * HOUR_S])
def test_clock_that_is_set_changes_no_charge_of_one_manager(world: World, wall: float) -> None:
    charge(world, (0.0, 100.0), (HOUR_S, wall))
    assert world.jobs["a"].audit.cost.dollars == pytest.approx(2.0)


def test_clock_behind_the_last_manager_charges_nothing(world: World) -> None:
    charge(world, (0.0, 100.0))
    world.periodic.charged_at = None
    charge(world, (0.0, 50.0))
    assert world.jobs["a"].audit.cost.dollars == 0.0


def test_cost_survives_the_stored_form_of_the_audit(world: World) -> None:
    charge(world, (0.0, 100.0), (HOUR_S, 100.0 + HOUR_S))
    audit = Audit.model_validate_json(world.jobs["a"].audit.model_dump_json())
    audit.tokens_generated, audit.tokens_saved, audit.delivered = 1_000_000, 250_000, 4_000
    audit.tokens_regenerated["late"] = 500_000
    report = cost_report(audit, steps=4, max_dollars=3.0)
    assert report["workers"] == [{"role": "preemptible", "kind": "k", "hours": 1.0, "dollars": 2.0}]
    assert report["dollars_per_step"] == 0.5
    assert report["dollars_per_1000_samples"] == 0.5
    assert report["dollars_per_million_tokens"] == 2.0
    assert report["dollars_saved_by_migration"] == 0.5
    assert report["dollars_regenerated"] == 1.0
    assert report["dollars_regenerated_by_cause"] == {"late": 1.0}
    assert (report["max_dollars"], report["budget_reached"]) == (3.0, False)


def test_each_step_without_spot_workers_is_estimated_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    estimates: list[tuple[float, float] | None] = [None, (90.0, 1.5), (80.0, 1.0)]
    monkeypatch.setattr(charging, "step_without_spot", lambda _jobs, _fleet, _job: estimates.pop(0))
    world.jobs["a"].record.step = 1
    charge(world, (0.0, 100.0), (10.0, 110.0), (20.0, 120.0))
    assert cost_report(world.jobs["a"].audit, steps=1, max_dollars=None)["reserved_only"]["seconds"] == 90.0
    world.jobs["a"].record.step = 3
    charge(world, (30.0, 130.0))
    assert cost_report(world.jobs["a"].audit, steps=3, max_dollars=None)["reserved_only"] == {
        "seconds": 90.0 + 2 * 80.0,
        "dollars": 1.5 + 2 * 1.0,
        "break_even_price_per_hour": pytest.approx(3.5 / (30.0 / HOUR_S)),
    }


def test_break_even_price_is_what_the_job_would_cost_more_without_spot() -> None:
    audit = Audit()
    audit.cost.charge("reserved", "k", 6.0, HOUR_S)
    assert cost_report(audit, steps=10, max_dollars=None)["reserved_only"] is None
    audit.cost.add_estimate(10, 600.0, 1.0)
    assert cost_report(audit, steps=10, max_dollars=None)["reserved_only"]["break_even_price_per_hour"] is None
    audit.cost.charge("preemptible", "k", 0.5, 2 * HOUR_S)
    assert cost_report(audit, steps=10, max_dollars=None)["reserved_only"]["break_even_price_per_hour"] == 2.0
    audit.cost.charge("trainer", "", 1.0, HOUR_S)
    assert cost_report(audit, steps=10, max_dollars=None)["reserved_only"]["break_even_price_per_hour"] == 1.5
    audit.cost.charge("reserved", "k", 6.0, HOUR_S)
    assert cost_report(audit, steps=10, max_dollars=None)["reserved_only"]["break_even_price_per_hour"] == 0.0


def test_cost_of_a_job_without_a_step_has_no_ratios() -> None:
    report = cost_report(Audit(), steps=0, max_dollars=None)
    assert report["dollars"] == 0.0
    assert report["dollars_per_step"] is report["dollars_per_million_tokens"] is None
