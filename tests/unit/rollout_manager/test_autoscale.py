"""The number of workers that autoscaling decides, and which workers it drains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain import autoscale
from rlboost.services.rollout_manager.domain.autoscale import (
    COOL_DOWN_S,
    Autoscaler,
    FleetView,
    surplus,
    workers_to_request,
)
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS
from rlboost.services.rollout_manager.domain.offers import NO_LIMITS, Limits, Offer, OfferBook, Pool
from rlboost.services.rollout_manager.domain.windows import StepMeter, WindowTuner
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


def test_workers_that_were_there_do_not_delay_the_first_increase() -> None:
    fleet = Fleet(k=1)
    assert fleet.at(0.0, None) == {"k": 1}
    fleet.present = {"k": 2}
    assert fleet.at(1.0, None) == {"k": 2}
    assert fleet.at(2.0, 3) == {"k": 3}
    assert fleet.at(3.0, 5) == {"k": 3}


@pytest.mark.parametrize("desired", [0.2, 2.0])
def test_worker_that_turns_out_slow_is_replaced_by_one_of_a_faster_kind_and_not_by_none(desired: float) -> None:
    scaler = Autoscaler(None, DELAY_S)
    planned = [Offer("slow", 1, 1.0, speed=2.0, label="slow"), Offer("fast", 1, 1.0)]
    scaler.decide(FleetView(2.0, planned), None, 0.0)
    assert scaler.targets == {"slow": 1, "fast": 0}
    measured = [planned[0]._replace(speed=0.2), planned[1]]
    scaler.decide(FleetView(desired, measured, {"slow": 1}, {"slow": 1}), None, 1.0)
    assert scaler.targets["fast"] == 1
    assert "cheaper per token than slow" in scaler.reason


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


@pytest.mark.parametrize("fixed", [None, 4])
def test_workers_stay_until_their_successors_are_ready(fixed: int | None) -> None:
    scaler, offers = Autoscaler(None, 0.0), [Offer("a", 9, 1.0), Offer("b", 9, 2.0)]
    scaler.decide(FleetView(4, offers), fixed, 0.0)
    dearer = [offers[0]._replace(price_per_hour=9.0), offers[1]]
    for ready, held in (({"a": 4}, 4), ({"a": 4, "b": 1}, 3), ({"a": 3, "b": 4}, 0)):
        scaler.decide(FleetView(4, dearer, {"a": 4}, ready), fixed, 100.0)
        assert scaler.targets == {"a": held, "b": 4}


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
    return autoscale.fleet_view(world.jobs, world.fleet, OfferBook(pools), NO_LIMITS, Now(0.0, 0.0))


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


def deadline_of(world: World, name: str, finish_by: float) -> None:
    job = world.jobs[name].record
    elastic = job.spec.elastic.model_copy(update={"finish_by": datetime.fromtimestamp(finish_by, UTC)})
    job.spec = job_spec(steps=100).model_copy(update={"elastic": elastic})
    job.window_tuner = WindowTuner(target_workers=6, work_s=500.0, train_s=10.0, step_s=510.0)


def test_deadlines_share_the_dollars_with_reserved_workers_and_other_jobs() -> None:
    """Each needs 5 workers of 100 dollars; two reserved ones cost 16, and the limit leaves 7 workers for both."""
    world = World(2.0, {"k": 100.0})
    for number, name in enumerate("ij"):
        priced_job(world, name, number)
        deadline_of(world, name, 9000.0)

    def late(limit: float) -> set[str]:
        book = OfferBook([Pool(kind="k", max_workers=20)])
        seen = autoscale.fleet_view(world.jobs, world.fleet, book, Limits(limit), Now(0.0, 0.0))
        return set(seen.late)

    assert late(1016.0) == set()
    assert late(1015.0) == late(516.0) == {"j"}
    assert late(515.0) == {"i", "j"}


@pytest.mark.parametrize(("price", "desired"), [(100.0, 0), (0.1, 6)])
def test_closed_offer_does_not_make_a_job_meet_its_deadline(price: float, desired: int) -> None:
    world = World(2.0, {"k": price})
    priced_job(world, "j", 1)
    deadline_of(world, "j", 9000.0)
    book = OfferBook([Pool(kind="k", max_workers=6)])
    book.records["k"].fail("starts no workers", 0, 0.0)
    seen = autoscale.fleet_view(world.jobs, world.fleet, book, NO_LIMITS, Now(0.0, 0.0))
    assert (seen.desired, seen.late) == (desired, {"j": 51_000.0})


@pytest.mark.parametrize(
    ("limits", "limited_by"),
    [(Limits(10.1), "max_dollars_per_hour"), (Limits(max_share=0.5), "max_share"), (NO_LIMITS, None)],
)
def test_limit_that_keeps_the_fleet_from_growing_is_named(limits: Limits, limited_by: str | None) -> None:
    world = World(2.0, {"a": 0.5, "b": 0.5})
    priced_job(world, "j", 1)
    pools = [Pool(kind="a", max_workers=20), Pool(kind="b", max_workers=2)]
    seen = autoscale.fleet_view(world.jobs, world.fleet, OfferBook(pools), limits, Now(0.0, 0.0))
    dollars = None if math.isinf(limits.dollars_per_hour) else limits.dollars_per_hour
    scaler = Autoscaler(dollars, 0.0, limits.max_share)
    scaler.decide(seen, None, 1.0)
    assert scaler.limited_by == limited_by


def test_kind_without_a_price_counts_as_the_dearest_while_others_have_one() -> None:
    world = World(lease_s=2.0)
    pools = [Pool(kind="a", max_workers=9), Pool(kind="b", max_workers=9)]
    assert [offer.price_per_hour for offer in fleet_view(world, pools).offers] == [0.0, 0.0]
    world.fleet.join(worker_joined("a", kind="a", price_per_hour=2.0), 0.0)
    assert [offer.price_per_hour for offer in fleet_view(world, pools).offers] == [2.0, 2.0]
    world.fleet.set_prices({"b": 0.0})
    assert [offer.price_per_hour for offer in fleet_view(world, pools).offers] == [2.0, 0.0]


# --- a constant workload ------------------------------------------------------------------------------------------

TRAIN_S = 100.0


class Workload:
    """A job whose every step needs as many tokens, next to a reserved worker. Spot workers start and stop at once."""

    def __init__(
        self,
        tokens: float,
        reserved: float,
        speeds: Mapping[str, float],
        prices: Mapping[str, float],
        limit: float | None = None,
    ) -> None:
        self.world = World(2.0, dict(prices))
        self.job = self.world.jobs.add(Job("j", 1, job_spec(), created_at=0.0, state="running")).record
        self.tokens, self.speeds = tokens, {**speeds, "own": reserved}
        self.join("own", "own", role="reserved")
        self.book = OfferBook([Pool(kind=kind, max_workers=200) for kind in speeds])
        self.scaler = Autoscaler(limit, DELAY_S)
        self.ripple = 0.0
        self.capacity: dict[str, int] = {}
        self.now = self.step_ends_at = 0.0

    def join(self, name: str, kind: str, **fields: object) -> None:
        worker = self.world.fleet.join(worker_joined(name, kind=kind, slots=4, **fields), 0.0)
        assert worker is not None
        worker.state, worker.version, worker.assigned_version, worker.trust.allowance = "ready", 0, ("j", 0), math.inf
        for _ in range(MIN_OBSERVATIONS):
            worker.profile.observe(4, 0, self.speeds[kind])

    def finish_step(self) -> None:
        """The reserved worker generates in the window, the others also during training."""
        fleet = self.world.fleet.workers
        spot = sum(self.speeds[worker.joined.kind] for worker in fleet.values() if not worker.reserved)
        window_s = max(0.0, (self.tokens - spot * TRAIN_S) / (spot + self.speeds["own"]))
        meter = StepMeter(0.0, 0.0, fleet=len(fleet) - 1, reserved=1)
        spot_s = window_s + min(TRAIN_S, self.tokens / spot if spot else 0.0)
        for worker in fleet.values():
            seconds = window_s if worker.reserved else spot_s
            meter.credit(worker.id, 1.0, seconds, self.speeds[worker.joined.kind])
        meter.updated_at = window_s + TRAIN_S
        self.job.window_tuner.learn(meter.measure(window_s, 0.0, TRAIN_S, 0))
        self.step_ends_at = self.now + meter.updated_at

    def run(self, minutes: int) -> list[dict[str, int]]:
        """Return the targets over time, each once."""
        seen: list[dict[str, int]] = []
        for _ in range(6 * minutes):
            self.now += 10.0
            for worker in self.world.fleet.workers.values():
                worker.speed = 1.0 + self.ripple * math.sin(self.now / 30.0)
            if self.now >= self.step_ends_at:
                self.finish_step()
            self.book.observe(self.world.fleet, self.scaler.targets, self.now)
            limits, now = self.scaler.limits(), Now(self.now, 0.0)
            view = autoscale.fleet_view(self.world.jobs, self.world.fleet, self.book, limits, now)
            self.scaler.decide(view, None, self.now)
            if not seen or seen[-1] != self.scaler.targets:
                seen.append(dict(self.scaler.targets))
            for kind, target in self.scaler.targets.items():
                mine = [worker for worker in self.world.fleet.workers.values() if worker.joined.kind == kind]
                for worker in mine[target:]:
                    self.world.fleet.remove(worker, "left", "")
                for number in range(len(mine), min(target, self.capacity.get(kind, target))):
                    self.join(f"{kind}-{self.now}-{number}", kind)
        return seen


@pytest.mark.parametrize("needed", [12, 40])
def test_fast_reserved_worker_leaves_the_number_of_slow_spot_workers_alone(needed: int) -> None:
    load = Workload(needed * 500.0 * TRAIN_S, 20_000.0, {"k": 500.0}, {})
    growing = load.run(60)
    assert growing[-1] == {"k": needed} == max(growing, key=lambda targets: targets["k"])
    assert load.run(60) == [{"k": needed}]


@pytest.mark.parametrize("needed", [12, 40])
def test_throughput_that_changes_within_each_step_does_not_change_the_fleet(needed: int) -> None:
    load = Workload(needed * 500.0 * TRAIN_S, 1000.0, {"k": 500.0}, {})
    load.ripple = 0.1
    load.run(60)
    assert load.run(120) == [{"k": needed}]


@pytest.mark.parametrize(("a", "c"), [(500.0, 1500.0), (1500.0, 500.0), (500.0, 500.0)])
def test_fleet_that_moves_to_workers_of_another_speed_does_as_much_work_and_settles(a: float, c: float) -> None:
    work = 4500.0
    load = Workload(work * TRAIN_S, 1000.0, {"a": a, "c": c}, {"a": 9.0, "c": 1.0})
    assert load.run(60)[-1] == {"a": 0, "c": work / c}
    load.world.fleet.set_prices({"a": 1.0, "c": 9.0})
    moving = load.run(60)
    assert moving[-1] == {"a": work / a, "c": 0}
    assert all(a * targets["a"] + c * targets["c"] >= work for targets in moving)
    assert load.run(60) == moving[-1:]


def test_successors_that_never_come_cost_one_worker_at_a_time() -> None:
    load = Workload(4500.0 * TRAIN_S, 1000.0, {"a": 500.0, "c": 500.0}, {"a": 1.0, "c": 9.0}, limit=9.0)
    assert load.run(60)[-1] == {"a": 9, "c": 0}
    load.capacity["c"] = 0
    load.world.fleet.set_prices({"a": 1.0, "c": 0.5})
    load.run(10)
    assert all(targets["a"] >= 8 for targets in load.run(60))
    load.capacity.clear()
    assert load.run(60)[-1] == {"a": 0, "c": 9}


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


def test_workers_of_one_machine_leave_together() -> None:
    """Else each of two machines would run half of its workers, and ending one would end workers that are needed."""
    samples = {"a0": 0, "a1": 9, "b0": 1, "b1": 2}
    fleet = [worker(name, samples=n, host=name[0]) for name, n in samples.items()]
    assert list(surplus(fleet, {"k": 2}, None)) == ["b0", "b1"]
    assert list(surplus(fleet, {"k": 1}, None)) == ["b0", "b1", "a0"]


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
