"""The number of workers that autoscaling decides, and which workers it drains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain import allocation
from rlboost.services.rollout_manager.domain.allocation import (
    COOL_DOWN_S,
    Autoscaler,
    FleetView,
    surplus,
    workers_to_request,
)
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.offers import NO_LIMITS, Offer, OfferBook, Pool
from rlboost.services.rollout_manager.domain.windows import WindowTuner
from rlboost.services.rollout_manager.domain.workers import Worker
from rlboost.services.rollout_manager.domain.world import World
from tests.support.builders import job_spec, samples_of, worker_joined

DELAY_S = 300.0
ONE = [Pool(kind="k", max_workers=10)]
TWO = [Pool(kind="cheap", max_workers=2, price_per_hour=1.0), Pool(kind="dear", max_workers=4, price_per_hour=3.0)]


class Fleet:
    """An autoscaler whose provider starts and stops workers at once."""

    def __init__(self, pools: Sequence[Pool] = ONE, limit: float | None = None, **present: int) -> None:
        self.scaler = Autoscaler(limit, DELAY_S)
        self.offers = [Offer(pool.kind, pool.max_workers, pool.price_per_hour or 0.0) for pool in pools]
        self.present: dict[str, int] = present
        self.now = 0.0

    def at(self, now: float, desired: int | None, fixed: int | None = None, other: float = 0.0) -> dict[str, int]:
        self.now = now
        seen = FleetView(desired, self.offers, self.present, self.present, other)
        self.scaler.decide(seen, fixed, now)
        self.present = dict(self.scaler.targets)
        return self.scaler.targets


def test_fleet_grows_at_once_and_again_after_the_cool_down() -> None:
    fleet = Fleet()
    assert fleet.at(0.0, 3) == {"k": 3}
    assert fleet.at(COOL_DOWN_S / 2, 5) == {"k": 3}
    assert fleet.at(COOL_DOWN_S, 5) == {"k": 5}


def test_fleet_shrinks_to_the_most_desired_within_the_delay() -> None:
    fleet = Fleet(k=8)
    fleet.at(0.0, 8)
    assert fleet.at(100.0, 2) == {"k": 8}
    assert fleet.at(200.0, 4) == {"k": 8}
    assert fleet.at(250.0, 2) == {"k": 8}
    assert fleet.at(DELAY_S + 1, 2) == {"k": 4}
    assert fleet.at(200.0 + DELAY_S + 1, 2) == {"k": 2}


def test_number_that_alternates_changes_the_fleet_once() -> None:
    fleet = Fleet()
    sizes = [fleet.at(10.0 * i, 4 + i % 2)["k"] for i in range(200)]
    assert sizes == [4] * 3 + [5] * 197


def test_new_leader_drains_no_worker_within_the_delay() -> None:
    fleet = Fleet(k=6)
    assert fleet.at(0.0, 1) == fleet.at(DELAY_S - 1, 1) == {"k": 6}
    assert fleet.at(2 * DELAY_S, 1) == {"k": 1}


def test_unknown_number_keeps_the_fleet_with_one_worker_at_least() -> None:
    assert Fleet().at(0.0, None) == {"k": 1}
    fleet = Fleet(k=3)
    assert fleet.at(0.0, None) == fleet.at(10 * DELAY_S, None) == {"k": 3}


def test_operators_number_applies_at_once_in_both_directions() -> None:
    fleet = Fleet(k=5)
    assert fleet.at(0.0, 5, fixed=2) == {"k": 2}
    assert fleet.at(1.0, 5, fixed=4) == {"k": 4}
    assert fleet.at(2.0, 5, fixed=99) == {"k": 10}
    assert fleet.scaler.limited_by == "max_workers"


def test_pools_are_filled_in_their_order_up_to_the_limit_of_dollars() -> None:
    assert Fleet(TWO).at(0.0, 5) == {"cheap": 2, "dear": 3}
    fleet = Fleet(TWO, limit=9.0)
    assert fleet.at(0.0, 5, other=1.0) == {"cheap": 2, "dear": 2}
    assert fleet.scaler.limited_by == "max_dollars_per_hour"


@given(
    limit=st.floats(0.0, 50.0),
    pools=st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 9.0)), max_size=3),
    steps=st.lists(
        st.tuples(st.floats(0.0, 200.0), st.none() | st.integers(0, 40), st.none() | st.integers(0, 40)), max_size=12
    ),
    other=st.floats(0.0, 20.0),
)
def test_targets_never_pass_a_limit(
    limit: float,
    pools: list[tuple[int, float]],
    steps: list[tuple[float, int | None, int | None]],
    other: float,
) -> None:
    kinds = [Pool(kind=f"k{i}", max_workers=n, price_per_hour=price) for i, (n, price) in enumerate(pools)]
    fleet = Fleet(kinds, limit)
    for passed_s, desired, fixed in steps:
        targets = fleet.at(fleet.now + passed_s, desired, fixed, other=other)
        assert all(0 <= targets[pool.kind] <= pool.max_workers for pool in kinds)
        cost = sum(targets[pool.kind] * (pool.price_per_hour or 0.0) for pool in kinds)
        assert cost <= max(0.0, limit - other) + 1e-5


def fleet_view(world: World, pools: Sequence[Pool]) -> FleetView:
    return allocation.fleet_view(world.jobs, world.fleet, OfferBook(pools), NO_LIMITS, Now(0.0, 0.0))


# --- what the world shows -----------------------------------------------------------------------------------------


def test_view_counts_pooled_workers_that_do_not_drain() -> None:
    world = World(lease_s=2.0)
    for name, kind, price in (("a", "k", 1.0), ("b", "k", 2.0), ("c", "other", 4.0)):
        world.fleet.join(worker_joined(name, kind=kind, price_per_hour=price), 0.0)
    world.fleet.join(worker_joined("r", role="reserved", kind="k", price_per_hour=8.0), 0.0)
    world.fleet.drain(world.fleet.workers["b"], Now(0.0, 0.0), "a test")
    seen = fleet_view(world, ONE)
    assert (seen.present, seen.offers[0].price_per_hour, seen.other_dollars_per_hour) == ({"k": 1}, 8.0, 12.0)


@pytest.mark.parametrize(("own", "price"), [(0.0, 1.0), (2.0, 2.0), (0.5, 1.0)])
def test_view_prices_a_kind_as_its_most_expensive_worker(own: float, price: float) -> None:
    world = World(2.0, {"k": 1.0})
    world.fleet.join(worker_joined("a", kind="k", price_per_hour=own), 0.0)
    assert fleet_view(world, ONE).offers[0].price_per_hour == price


@pytest.mark.parametrize(("state", "target", "desired"), [("running", None, None), ("running", 3, 3), ("paused", 3, 0)])
def test_running_jobs_alone_want_workers(state: str, target: int | None, desired: int | None) -> None:
    world = World(lease_s=2.0)
    job = world.jobs.add(Job("j", 1, job_spec(), created_at=0.0, state=state)).record  # type: ignore[arg-type]
    job.window_tuner.target_workers = target
    assert fleet_view(world, ONE).desired == desired


def test_job_whose_budget_is_reached_wants_no_workers() -> None:
    world = World(lease_s=2.0)
    job = world.jobs.add(Job("j", 1, job_spec(), created_at=0.0, state="running")).record
    job.window_tuner.target_workers = 3
    world.jobs["j"].audit.cost.budget_reached = True
    assert fleet_view(world, ONE).desired == 0


@pytest.mark.parametrize(("price", "desired"), [(0.1, 6), (4.0, 3), (7.9, 0)])
def test_no_worker_is_desired_that_is_worth_less_than_its_price(price: float, desired: int) -> None:
    world = World(2.0, {"k": price})
    job = world.jobs.add(Job("j", 1, job_spec(), created_at=0.0, state="running")).record
    job.window_tuner = WindowTuner(target_workers=6, work_s=550.0, train_s=100.0, step_s=700.0)
    world.fleet.join(worker_joined("r", role="reserved", kind="own", price_per_hour=8.0), 0.0)
    world.fleet.workers["r"].assigned_version = ("j", 0)
    assert fleet_view(world, ONE).desired == desired


def priced_job(world: World, name: str, number: int) -> None:
    """A job with a reserved worker of 8 dollars that wants 5.5 preemptible ones."""
    job = world.jobs.add(Job(name, number, job_spec(), created_at=0.0, state="running")).record
    job.window_tuner = WindowTuner(target_workers=6, work_s=550.0, train_s=100.0, step_s=700.0)
    world.fleet.join(worker_joined(f"r-{name}", role="reserved", kind="own", price_per_hour=8.0), 0.0)
    world.fleet.workers[f"r-{name}"].assigned_version = (name, 0)


@pytest.mark.parametrize(
    ("pools", "paying"),
    [
        ([("a", 4, 4.0), ("b", 9, 7.9)], {"a": 4}),  # three for the first job; what it declines is left to the second
        ([("a", 4, 7.9), ("b", 9, 0.1)], {"b": 9}),  # the first pool pays for neither
        ([("a", 4, 0.1)], {"a": 4}),
    ],
)
def test_jobs_share_the_workers_that_pay(pools: list[tuple[str, int, float]], paying: dict[str, int]) -> None:
    world = World(2.0, {kind: price for kind, _, price in pools})
    priced_job(world, "i", 1)
    priced_job(world, "j", 2)
    kinds = [Pool(kind=kind, max_workers=n) for kind, n, _ in pools]
    seen = fleet_view(world, kinds)
    scaler = Autoscaler(None, scale_in_delay_s=0.0)
    scaler.decide(seen, None, 1.0)
    scaler.decide(seen, None, 100.0)
    assert +Counter(scaler.targets) == paying
    assert scaler.limited_by == ("max_workers" if len(pools) == 1 else None)


@pytest.mark.parametrize(
    ("finish_by", "desired", "late"),
    [
        (None, 0, None),
        (52_000.0, 0, None),  # the reserved worker alone takes 100 steps of 510 s
        (9000.0, 5, None),  # with 4 a step takes 102 s, with 5 it takes 85 s
        (6000.0, 6, 7286.0),
    ],
)
def test_deadline_gets_the_fewest_workers_that_meet_it(
    finish_by: float | None, desired: int, late: float | None
) -> None:
    """They cost more than they are worth, so that without a deadline there is none."""
    world = World(2.0, {"k": 100.0})
    priced_job(world, "j", 1)
    job = world.jobs["j"].record
    job.spec = job_spec(steps=100)
    if finish_by is not None:
        at = datetime.fromtimestamp(finish_by, UTC)
        job.spec = job.spec.model_copy(update={"elastic": job.spec.elastic.model_copy(update={"finish_by": at})})
    job.window_tuner = WindowTuner(target_workers=6, work_s=500.0, train_s=10.0, step_s=510.0)
    seen = fleet_view(world, [Pool(kind="k", max_workers=6)])
    assert seen.desired == desired
    assert seen.late.get("j") == (late and pytest.approx(late, abs=1))


# --- which workers leave ------------------------------------------------------------------------------------------


def worker(name: str, *, samples: int = 0, **fields: object) -> Worker:
    found = Worker(worker_joined(name, **fields), 0.0)
    found.samples = samples_of(samples)
    return found


def test_workers_with_the_fewest_samples_leave_first() -> None:
    fleet = [worker("busy", samples=9), worker("old", at=1.0), worker("new", at=2.0), worker("x", kind="other")]
    fleet.append(worker("r", role="reserved"))
    assert list(surplus(fleet, {"k": 2}, None)) == ["new"]
    assert list(surplus(fleet, {"k": 1}, None)) == ["new", "old"]


def test_newest_workers_leave_while_all_cost_too_much() -> None:
    fleet = [worker(f"w{i}", price_per_hour=2.0, at=float(i)) for i in range(3)]
    fleet.append(worker("r", role="reserved", price_per_hour=3.0, at=9.0))
    assert list(surplus(fleet, {}, 7.0)) == ["w2"]
    assert list(surplus(fleet, {"k": 1}, 7.0)) == ["w2", "w1"]
    assert not surplus(fleet, {}, 9.0)


@pytest.mark.parametrize(
    ("target", "before", "present", "workers"),
    [
        (5, 3, 3, 5),  # more at once
        (2, 5, 3, 3),  # fewer than those that are only starting: these are cancelled
        (2, 5, 5, 5),  # fewer only as they leave
        (2, 5, 2, 2),
        (2, 3, 9, 3),  # workers of earlier incarnations count twice for a moment
        (2, None, 4, 4),  # a new leader does not know what was requested
        (4, None, 1, 4),
    ],
)
def test_provider_is_asked_for_fewer_only_as_workers_leave(
    target: int, before: int | None, present: int, workers: int
) -> None:
    assert workers_to_request(target, before, present) == workers
