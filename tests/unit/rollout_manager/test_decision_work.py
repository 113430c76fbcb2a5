"""Decisions do no work in proportion to the queue, and shortcuts do not change what is decided.

Work is counted in calls, which depends on no clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.decisions import Load
from rlboost.services.rollout_manager.domain.measurements import MIN_OBSERVATIONS, Profile
from rlboost.services.rollout_manager.domain.placement import Candidates, has_capacity, set_batch_cap
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


@given(shape=SHAPES, receivers=st.lists(st.integers(0, 7) | st.none(), max_size=40))
def test_candidates_rank_as_if_all_workers_were_compared_anew(
    known: Profile, shape: Shape, receivers: list[int | None]
) -> None:
    """Whether the best worker gets each sample, or another one that it prefers."""
    workers = fleet(shape, known)
    candidates = Candidates(workers, known)
    for number in receivers:
        best = candidates.best()
        assert best == min(filter(has_capacity, workers), key=rank, default=None)
        if (receiver := best if number is None else workers[number % len(workers)]) is not None:
            receiver.samples = samples_of(len(receiver.samples) + 1)
            receiver.kv.held += 1000
