"""Decisions do no work in proportion to the fleet or to the queue, and shortcuts do not change what is decided.

Work is counted in calls, which depends on no clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import FrameType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.decisions import Load
from rlboost.services.rollout_manager.domain.candidates import (
    CandidatePool,
    RunningSample,
    WorkerLoad,
    has_capacity,
    is_balanced,
    select_migrations,
    set_batch_cap,
)
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS, Profile
from rlboost.services.rollout_manager.domain.placement import REBALANCE_EVERY_S, rebalance
from rlboost.services.rollout_manager.domain.workers import Worker
from tests.support.builders import samples_of, worker_joined

ENDED = 8


def calls_in(function: Callable[[], object]) -> int:
    """Return how many calls of functions, resumed generators included, a call makes."""
    calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def turn_calls(queued: int) -> int:
    load = Load(workers=2, samples_each=16)
    load.turn(load.requests(queued))
    load.turn([*load.requests(ENDED), *load.ends(ENDED)])
    messages = [*load.requests(ENDED), *load.ends(ENDED)]
    return calls_in(lambda: load.turn(messages))


def test_turn_makes_no_more_calls_where_more_samples_are_queued() -> None:
    assert turn_calls(queued=8_000) < 1.2 * turn_calls(queued=800)


def rebalance_calls(workers: int) -> int:
    world = Load(workers, samples_each=8).manager.world
    now = Now(1e3, 1e3)
    rebalance(world, now)
    later = Now(now.mono + 2 * REBALANCE_EVERY_S, now.wall)
    return calls_in(lambda: rebalance(world, later))


def test_rebalance_compares_no_loads_of_a_balanced_fleet() -> None:
    per_worker = (rebalance_calls(48) - rebalance_calls(16)) / 32
    assert per_worker <= 2, "only a pass over intervals that are known already"


Shape = list[tuple[int, int, float, int]]
SHAPES: st.SearchStrategy[Shape] = st.lists(
    st.tuples(st.integers(1, 32), st.integers(0, 40), st.floats(0.1, 2.0), st.integers(0, 50_000)),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def known() -> Profile:
    profile = Profile()
    for running in (1, 4, 16, 64) * MIN_OBSERVATIONS:
        profile.observe(running, 100 * running, running / (0.02 + 0.002 * running))
    return profile


def fleet(shape: Shape, profile: Profile) -> list[Worker]:
    workers = []
    for number, (slots, load, speed, held) in enumerate(shape):
        worker = Worker(worker_joined(f"w{number}", slots=slots), 0.0, samples=samples_of(load), profile=profile)
        worker.speed, worker.kv.held = speed, held
        set_batch_cap(worker, 0.0)
        workers.append(worker)
    return workers


def rank(worker: Worker) -> tuple[float | str, ...]:
    running, profile = worker.load + 1, worker.profile
    step_s = profile.step_s(min(running, worker.batch_cap), worker.kv.held) / worker.speed
    return max(0, running - worker.batch_cap), step_s, running / worker.joined.slots, worker.id


def intervals(worker: Worker) -> tuple[float, float]:
    load = worker.load, worker.batch_cap, worker.kv.held
    more = worker.load + 1, worker.batch_cap, worker.kv.held
    return (
        worker.profile.token_interval_s(*load) / worker.speed,
        worker.profile.token_interval_s(*more) / worker.speed,
    )


@given(shape=SHAPES, changes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)) | st.none(), max_size=16))
@example(shape=[(64, 0, 1.0, 0), (64, 5, 1.0, 0)], changes=[(1, 20), (0, 10)])  # the second one's old rank is the best
def test_pool_decides_as_if_all_workers_were_compared_anew(
    known: Profile, shape: Shape, changes: list[tuple[int, int] | None]
) -> None:
    pool, workers = CandidatePool(), {worker.id: worker for worker in fleet(shape, known)}
    for worker in workers.values():
        pool.update(worker, known)
    for change in changes:
        best = pool.best()
        if change is not None:
            number, load = change
            worker = list(workers.values())[number % len(workers)]
            worker.samples = samples_of(load)
            pool.update(worker, known)
        elif best is not None:  # it gets a sample
            workers[best].samples = samples_of(len(workers[best].samples) + 1)
            pool.update(workers[best], known)
        expected = min(filter(has_capacity, workers.values()), key=rank, default=None)
        assert pool.best() == (expected and expected.id)
        now_s, next_s = zip(*map(intervals, workers.values()), strict=True)
        assert pool.is_balanced() == is_balanced(max(now_s), min(next_s))


@given(shape=SHAPES)
def test_no_migration_pays_in_a_pool_that_is_balanced(known: Profile, shape: Shape) -> None:
    pool, workers = CandidatePool(), fleet(shape, known)
    for worker in workers:
        pool.update(worker, known)
    running = [RunningSample(i, 1e6, 1, started=False, on_worker_s=1e6) for i in range(40)]
    loads = [
        WorkerLoad(w.id, w.batch_cap, w.load, w.kv.held, known, w.speed, partial(islice, running, w.load))
        for w in workers
    ]
    assert not (pool.is_balanced() and select_migrations(loads))
