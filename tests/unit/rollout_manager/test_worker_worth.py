"""How much of its time a worker generates, how often it is preempted, and what one more is worth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS
from rlboost.services.rollout_manager.domain.money import (
    expected_step_s,
    paying_workers,
    speedup_of_one_more,
    step_without_spot,
    worth_of_one_more,
)
from rlboost.services.rollout_manager.domain.offers import Offer
from rlboost.services.rollout_manager.domain.stalls import lose_worker
from rlboost.services.rollout_manager.domain.step_windows import MAX_CREDIT_S
from rlboost.services.rollout_manager.domain.windows import StepMeter, Window, WindowTuner
from rlboost.services.rollout_manager.domain.workers import Lifetimes, availability
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.messages import Message, StepReport
from tests.support.builders import heartbeat, job_running, job_spec, trainer_status, worker_joined

HOUR_S = 3600.0


def apply(world: World, at: float, *messages: Message) -> None:
    for message in messages:
        apply_message(world, message, "1-0", Now(mono=at, wall=at))


@pytest.fixture
def world() -> World:
    """A job in step 0, with one reserved worker at 8 dollars per hour and one spot worker at 1."""
    return world_of(job_spec())


def world_of(spec: JobSpec) -> World:
    world = World(lease_s=2.0)
    apply(world, 0.0, *job_running(spec=spec))
    for name, role, price in (("own", "reserved", 8.0), ("spot", "preemptible", 1.0)):
        apply(world, 0.0, worker_joined(name, role=role, price_per_hour=price, kind=name, slots=8))
        world.fleet.workers[name].assigned_version = ("j", 0)
    window = world.jobs["j"].progress.window = Window(0, 10.0, began_at=0.0)
    window.meter = StepMeter(0.0, 0.0)
    return world


def meter(world: World) -> StepMeter:
    window = world.jobs["j"].progress.window
    assert window
    assert window.meter
    return window.meter


# --- effective compute ---


@pytest.mark.parametrize(("running", "work_s"), [(0, 0.0), (2, 0.25), (8, 1.0), (9, 1.0)])
def test_worker_without_a_profile_counts_by_its_part_of_a_full_batch(world: World, running: int, work_s: float) -> None:
    apply(world, 1.0, heartbeat("spot", running=running))
    apply(world, 2.0, heartbeat("spot", running=running))
    assert meter(world).work_s == work_s


def test_worker_that_pulls_weights_counts_nothing(world: World) -> None:
    for at in (1.0, 2.0, 3.0):
        apply(world, at, heartbeat("spot", state="pulling", version=-1))
    assert meter(world).work_s == 0.0


def test_fixed_time_of_decode_steps_is_latency_and_the_rest_is_work(world: World) -> None:
    for name in ("own", "spot"):
        for running in (1, 8, 64) * MIN_OBSERVATIONS:
            world.fleet.workers[name].profile.observe(running, 0, running / (0.02 + 0.001 * running))
    meter(world).update(0.5, fleet=1, reserved=1, working=True)
    for at in (1.0, 2.0):
        apply(world, at, heartbeat("own", running=30), heartbeat("spot", running=30))
    before = meter(world).generation
    apply(world, 3.0, heartbeat("own", running=0), heartbeat("spot", running=1))
    together = meter(world).generation
    apply(world, 4.0, heartbeat("own", running=0), heartbeat("spot", running=0))
    alone = meter(world).generation
    # 0.02 s of each decode step of 0.05 s are fixed, for both workers at once.
    assert together.work_s - before.work_s == pytest.approx(2 * 0.6, rel=1e-3)
    assert together.latency_s - before.latency_s == pytest.approx(0.4, rel=1e-3)
    # Then one of them has the last sample.
    assert alone.work_s - together.work_s == pytest.approx(1 / 21, rel=1e-3)
    assert alone.latency_s - together.latency_s == pytest.approx(20 / 21, rel=1e-3)


def test_throughput_of_the_mean_worker_is_that_of_trusted_ones_by_their_work(world: World) -> None:
    for name, tokens_per_s, allowance in (("own", 800.0, math.inf), ("spot", 100.0, math.inf), ("new", 9e9, 4.0)):
        if name == "new":
            apply(world, 0.0, worker_joined("new", kind="new", slots=8))
            world.fleet.workers["new"].assigned_version = ("j", 0)
        world.fleet.workers[name].trust.allowance = allowance
        for running in (1, 8) * MIN_OBSERVATIONS:
            world.fleet.workers[name].profile.observe(running, 0, tokens_per_s * running / 8)
    apply(world, 1.0, heartbeat("own", running=8), heartbeat("spot", running=8), heartbeat("new", running=8))
    rates = {name: world.fleet.workers[name].expected_tokens_per_s() for name in ("own", "spot")}
    shares = {name: world.fleet.workers[name].batch_share() for name in ("own", "spot")}
    apply(world, 2.0, heartbeat("own", running=8), heartbeat("new", running=8))
    apply(world, 4.0, heartbeat("spot", running=8))
    found = meter(world).measure(0.0, 0.0, 1.0, 0).worker_tokens_per_s
    work = {"own": shares["own"] * 1.0, "spot": shares["spot"] * 3.0}
    assert found == pytest.approx(sum(work[name] * rates[name] for name in work) / sum(work.values()))
    assert rates["spot"] < found < rates["own"]


def test_silence_of_a_worker_counts_for_a_limited_time(world: World) -> None:
    apply(world, 1.0, heartbeat("spot", running=8))
    apply(world, 1000.0, heartbeat("spot", running=8))
    assert meter(world).work_s == MAX_CREDIT_S


# --- preemptions ---


def test_hazard_is_preemptions_per_time_of_all_workers_of_the_kind(world: World) -> None:
    apply(world, 1.0, worker_joined("other", kind="spot"))
    apply(world, 1.0, heartbeat("spot", at=HOUR_S), heartbeat("other", at=3 * HOUR_S))
    assert world.fleet.preemptions_per_s("spot") == 0.0
    lose_worker(world.jobs, world.fleet, world.queues, world.fleet.workers["spot"], Now(2.0, 2.0))
    assert world.fleet.preemptions_per_s("spot") == pytest.approx(1 / (4 * HOUR_S))
    assert world.fleet.preemptions_per_s("own") == 0.0


def test_startup_lasts_from_the_join_until_the_first_version_is_served(world: World) -> None:
    apply(world, 1.0, heartbeat("spot", state="joining", at=10.0))
    apply(world, 1.0, heartbeat("spot", state="pulling", at=20.0))
    apply(world, 1.0, heartbeat("spot", at=90.0), heartbeat("spot", state="pulling", at=200.0))
    apply(world, 1.0, heartbeat("spot", at=300.0), heartbeat("own", at=9000.0))
    assert world.fleet.lifetimes["spot"].startup_s == 90.0
    assert "own" not in world.fleet.lifetimes, "it was ready when it was seen first"


def test_availability_is_lifetime_per_lifetime_and_startup() -> None:
    lifetimes = Lifetimes(departed_s=9 * HOUR_S, preemptions=10)
    lifetimes.on_startup(HOUR_S / 4)
    assert availability(lifetimes.preemptions_per_s(HOUR_S), lifetimes.startup_s) == pytest.approx(0.8)
    assert availability(0.0, 100.0) == 1.0


# --- the worth of one more ---


@given(
    workers=st.integers(0, 50),
    reserved=st.integers(1, 50),
    latency_s=st.floats(0.0, 1e4),
    work_s=st.floats(1.0, 1e5),
    train_s=st.floats(1.0, 1e4),
)
def test_each_further_worker_gains_less(
    workers: int, reserved: int, latency_s: float, work_s: float, train_s: float
) -> None:
    tuner = WindowTuner(latency_s=latency_s, work_s=work_s, train_s=train_s, step_s=2 * train_s, fleet_mean=workers)
    first, second = (speedup_of_one_more(tuner, n, reserved) for n in (workers, workers + 1))
    assert 0 <= second <= first * (1 + 1e-9) + 1e-9
    if tuner.generation.duration_s(workers) <= train_s:
        assert first == 0


def finish_step(world: World, work_s: float) -> None:
    """End step 0, of 220 s with 100 s of training, and 11,000 tokens."""
    measured = meter(world)
    measured.update(220.0, fleet=1, reserved=1, working=True)
    measured.work_s = work_s
    world.jobs["j"].audit.tokens_delivered += 11_000
    apply(world, 220.0, StepReport(job_id="j", step=0, metrics={}, checkpointed_step=0, wait_s=0.0, train_s=100.0))


def test_worth_of_one_more_is_unknown_before_the_first_step_ends(world: World) -> None:
    assert worth_of_one_more(world.jobs, world.fleet) is None


def test_worth_of_one_more_is_its_tokens_at_the_present_price(world: World) -> None:
    finish_step(world, work_s=300.0)
    # The window of one worker is 100 s, that of two 33 s; another 20 s of the step remain.
    speedup = 220.0 / (220.0 - 100.0 + 100.0 / 3) - 1.0
    assert worth_of_one_more(world.jobs, world.fleet) == {
        "job_id": "j",
        "tokens_per_hour": pytest.approx(speedup * 50 * HOUR_S),
        "dollars_per_hour": pytest.approx(speedup * 9.0),
        "price_per_hour": 1.0,
    }


def test_trainer_counts_in_what_one_more_is_worth_and_in_a_step_without_spot(world: World) -> None:
    window = world.jobs["j"].progress.window
    assert window
    window.lasted_s = 100.0
    finish_step(world, work_s=300.0)
    before = worth_of_one_more(world.jobs, world.fleet)
    world.jobs["j"].progress.on_trainer_status(trainer_status(price_per_hour=9.0), 220.0)
    priced = worth_of_one_more(world.jobs, world.fleet)
    assert before
    assert priced
    assert priced["dollars_per_hour"] == pytest.approx(2 * before["dollars_per_hour"])
    assert step_without_spot(world.jobs, world.fleet, world.jobs["j"]) == pytest.approx((420.0, 420.0 / HOUR_S * 17.0))


@pytest.mark.parametrize("halves", [(2, 0), (0, 2), (1, 1)])
def test_two_workers_for_half_a_step_are_one_worker_of_the_step(halves: tuple[int, int]) -> None:
    world = world_of(job_spec())
    for half, fleet in enumerate(halves):
        meter(world).update(110.0 * (half + 1), fleet=fleet, reserved=1, working=True)
    finish_step(world, work_s=300.0)
    tuner = world.jobs["j"].record.window_tuner
    assert expected_step_s(tuner, workers=1, reserved=1) == pytest.approx(220.0)
    assert expected_step_s(tuner, workers=0, reserved=1) == pytest.approx(420.0)


def test_one_more_is_worth_less_where_workers_are_often_preempted(world: World) -> None:
    finish_step(world, work_s=300.0)
    calm = worth_of_one_more(world.jobs, world.fleet)
    world.fleet.lifetimes["spot"] = Lifetimes(departed_s=HOUR_S, preemptions=4, startup_s=HOUR_S / 4)
    preempted = worth_of_one_more(world.jobs, world.fleet)
    assert calm
    assert preempted
    assert preempted["dollars_per_hour"] == pytest.approx(calm["dollars_per_hour"] / 2)


def test_one_more_is_worth_nothing_from_the_target_on(world: World) -> None:
    finish_step(world, work_s=100.0)
    worth = worth_of_one_more(world.jobs, world.fleet)
    assert worth
    assert worth["tokens_per_hour"] == worth["dollars_per_hour"] == 0.0


def test_step_without_spot_workers_leaves_their_work_to_the_reserved_ones(world: World) -> None:
    assert step_without_spot(world.jobs, world.fleet, world.jobs["j"]) is None
    window = world.jobs["j"].progress.window
    assert window
    window.lasted_s = 100.0
    finish_step(world, work_s=300.0)
    # In place of the 100 s of the window 300 s, 100 s of training, and 20 s besides both, at 8 dollars per hour.
    assert step_without_spot(world.jobs, world.fleet, world.jobs["j"]) == pytest.approx((420.0, 420.0 / HOUR_S * 8.0))


@pytest.mark.parametrize("seeding", ["auto", "off"])
def test_step_without_spot_is_the_same_if_workers_join_in_its_middle(seeding: str) -> None:
    """Two that generate for half of 220 s do what the reserved one would do in 220 s more."""
    world = world_of(job_spec(elastic={"seeding": seeding}))
    world.fleet.remove(world.fleet.workers["spot"], "left", "")
    for at in range(221):
        if at == 110:
            for name in ("b", "c"):
                apply(world, 110.0, worker_joined(name, slots=8), heartbeat(name, running=8))
                world.fleet.workers[name].assigned_version = ("j", 0)
        elif at > 110:
            apply(world, float(at), heartbeat("b", running=8), heartbeat("c", running=8))
        meter(world).update(float(at), fleet=2 if at >= 110 else 0, reserved=1, working=True)
    finish_step(world, work_s=meter(world).work_s)
    assert step_without_spot(world.jobs, world.fleet, world.jobs["j"]) == pytest.approx((440.0, 440.0 / HOUR_S * 8.0))


# --- workers that pay for themselves ---


@given(price=st.floats(0.1, 60.0), share=st.floats(0.1, 1.0), trainer=st.sampled_from([0.0, 3.0, 8.0]))
def test_each_paying_worker_makes_tokens_cheaper_and_one_more_does_not(
    price: float, share: float, trainer: float
) -> None:
    """The trainer's machine may have the price of the reserved worker on it, in part or in whole."""
    world = World(lease_s=2.0)
    apply(world, 0.0, *job_running(), worker_joined("own", role="reserved", price_per_hour=8.0 - trainer))
    world.jobs["j"].progress.on_trainer_status(trainer_status(price_per_hour=trainer), 0.0)
    world.fleet.workers["own"].assigned_version = ("j", 0)
    job = world.jobs["j"]
    tuner = job.record.window_tuner = WindowTuner(target_workers=6, work_s=550.0, train_s=100.0, step_s=700.0)
    accepted = paying_workers(world.jobs, world.fleet, job, [Offer("k", 9, price, share)])
    assert accepted is not None
    found = accepted.workers["k"]
    worths = [share * speedup_of_one_more(tuner, n, 1) * (8.0 + n * price) for n in range(6)]
    assert all(worth >= price for worth in worths[:found])
    assert found == 6 or worths[found] < price


@pytest.mark.parametrize(("own", "spot"), [(0.0, 50.0), (8.0, 0.0)])
def test_workers_are_not_weighed_against_prices_that_are_unknown(own: float, spot: float) -> None:
    world = World(lease_s=2.0)
    apply(world, 0.0, *job_running(), worker_joined("own", role="reserved", price_per_hour=own))
    world.fleet.workers["own"].assigned_version = ("j", 0)
    world.jobs["j"].record.window_tuner = WindowTuner(target_workers=6, work_s=550.0, train_s=100.0, step_s=700.0)
    assert paying_workers(world.jobs, world.fleet, world.jobs["j"], [Offer("k", 9, spot, 1.0)]) == ({"k": 6}, None, 0.0)
