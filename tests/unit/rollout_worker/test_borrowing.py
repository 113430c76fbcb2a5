"""When a worker beside a serving engine yields the device, and when it takes it back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlboost.services.rollout_worker.domain.borrowing import (
    MAX_CALM_S,
    MIN_CALM_S,
    WINDOW_S,
    WORTHWHILE_S,
    Borrowing,
    Seats,
    ServingLoad,
)
from rlboost.services.rollout_worker.settings import Settings

TICK_S = 0.05
IDLE = ServingLoad(0, 0, {0.1: 0, math.inf: 0})
BUSY = ServingLoad(1, 0, {0.1: 0, math.inf: 0})


class Serving:
    """A clock, a server's load, and the worker's decisions."""

    def __init__(self, borrowing: Borrowing) -> None:
        self.borrowing = borrowing
        self.now_s = 1000.0
        self.fast = self.slow = 0

    def served(self, *, fast: int = 0, slow: int = 0) -> None:
        """Count first tokens within and above 100 ms."""
        self.fast, self.slow = self.fast + fast, self.slow + slow

    def pass_(self, seconds: float, running: float = 0, waiting: float = 0) -> str:
        """Let time pass with this load; return the last reason to yield."""
        for _ in range(max(1, round(seconds / TICK_S))):
            self.now_s += TICK_S
            load = ServingLoad(running, waiting, {0.1: self.fast, math.inf: self.fast + self.slow})
            self.borrowing.observe(load, self.now_s)
        return self.borrowing.reason


def generating(borrowing: Borrowing) -> Serving:
    serving = Serving(borrowing)
    assert serving.pass_(MIN_CALM_S)
    assert not serving.pass_(2 * TICK_S)
    return serving


def test_it_begins_yielding_and_generates_after_a_calm_time() -> None:
    generating(Borrowing())


def test_pressure_counts_at_once() -> None:
    assert generating(Borrowing()).pass_(TICK_S, running=1) == "1 requests run"
    assert generating(Borrowing(max_running=4)).pass_(TICK_S, waiting=1) == "1 of its requests wait"
    assert generating(Borrowing(max_running=4)).pass_(TICK_S, running=5)


def test_running_requests_up_to_the_limit_share_the_device() -> None:
    assert not generating(Borrowing(max_running=4)).pass_(10, running=4)


def test_request_that_came_and_went_between_two_looks_counts() -> None:
    serving = generating(Borrowing())
    serving.served(fast=1)
    assert serving.pass_(TICK_S) == "1 requests run"


def test_server_without_an_answer_is_busy() -> None:
    serving = generating(Borrowing(max_running=100))
    assert serving.borrowing.observe(None, serving.now_s) == "it does not answer in time"
    assert serving.borrowing.calm_s == MIN_CALM_S, "it may be this worker that was late"


def test_restarted_server_has_no_requests_from_before() -> None:
    serving = generating(Borrowing(ttft_limit_s=0.1))
    serving.served(fast=100, slow=3)
    serving.pass_(WINDOW_S + 1)
    serving.fast = serving.slow = 0
    assert not serving.pass_(TICK_S)


def test_worthwhile_spells_keep_the_calm_time_short() -> None:
    serving = generating(Borrowing())
    for _ in range(5):
        serving.pass_(WORTHWHILE_S)
        serving.pass_(1, running=1)
        assert serving.borrowing.calm_s == MIN_CALM_S
        assert not serving.pass_(MIN_CALM_S + 2 * TICK_S)


def test_frequent_bursts_lengthen_the_calm_time_up_to_a_limit_until_a_spell_is_worthwhile() -> None:
    serving = generating(Borrowing())
    calm = []
    for _ in range(8):
        serving.pass_(TICK_S, running=1)
        calm.append(serving.borrowing.calm_s)
        assert serving.pass_(calm[-1] - TICK_S)
        assert not serving.pass_(3 * TICK_S)
    assert calm[:3] == [2 * MIN_CALM_S, 4 * MIN_CALM_S, 8 * MIN_CALM_S]
    assert calm[-1] == MAX_CALM_S
    serving.pass_(WORTHWHILE_S)
    serving.pass_(TICK_S, running=1)
    assert serving.borrowing.calm_s == MIN_CALM_S


def test_late_first_tokens_are_pressure_and_a_few_are_not() -> None:
    few = generating(Borrowing(max_running=8, ttft_limit_s=0.1))
    few.served(fast=96, slow=4)
    assert not few.pass_(TICK_S, running=8)
    many = generating(Borrowing(max_running=8, ttft_limit_s=0.1))
    many.served(fast=94, slow=6)
    assert many.pass_(TICK_S, running=8) == "6 of its last 100 first tokens took more than 100 ms"
    assert many.pass_(WINDOW_S - TICK_S, running=8)
    assert not many.pass_(many.borrowing.calm_s + 5 * TICK_S, running=8), "they are older than the window"


def test_limit_between_two_bounds_counts_as_the_lower_one() -> None:
    serving = generating(Borrowing(max_running=8, ttft_limit_s=0.15))
    serving.served(slow=1)
    assert serving.pass_(TICK_S, running=8)


def test_limit_that_serving_misses_without_the_worker_is_found() -> None:
    serving = generating(Borrowing(max_running=8, ttft_limit_s=0.1))
    serving.served(slow=20)
    serving.pass_(TICK_S, running=8)
    assert not serving.borrowing.late_alone, "the worker generated"
    for _ in range(round(2 * WINDOW_S / TICK_S) + 2):
        serving.served(slow=1)
        serving.pass_(TICK_S, running=8)
    assert "took more than 100 ms" in serving.borrowing.late_alone
    serving.pass_(WINDOW_S + MIN_CALM_S + 1)
    assert not serving.borrowing.late_alone


@given(st.lists(st.sampled_from([None, IDLE, BUSY]), max_size=400), st.integers(0, 1))
def test_it_generates_only_after_calm_and_never_under_pressure(loads: list[ServingLoad | None], limit: int) -> None:
    borrowing, now_s, calm_ticks = Borrowing(max_running=limit), 0.0, 0
    reasons = [borrowing.reason]
    for load in loads:
        now_s += TICK_S
        has_pressure = load is None or load.running > limit
        calm_ticks = 0 if has_pressure else calm_ticks + 1
        reasons.append(borrowing.observe(load, now_s))
        assert MIN_CALM_S <= borrowing.calm_s <= MAX_CALM_S
        if not reasons[-1]:
            assert not has_pressure
            assert (calm_ticks - 1) * TICK_S >= MIN_CALM_S - 1e-6
        if not has_pressure and (calm_ticks - 1) * TICK_S > borrowing.calm_s + 1e-6:
            assert not reasons[-1]


def seats_after(seats: Seats, seconds: float, now_s: float, *, first_token_s: float = 0.0) -> float:
    """Observe for a time, in each tick one request with this time to its first token, 0: none; return the time."""
    until_s = now_s + seconds
    while now_s < until_s:
        now_s += TICK_S
        seats.observe([first_token_s] if first_token_s else [], 0.0, now_s)
    return now_s


def test_seats_grow_while_it_is_calm_and_late_tokens_halve_them() -> None:
    seats = Seats(32, 0.1)
    now_s = seats_after(seats, 4, 0.0)
    assert seats.count == 32
    assert seats.observe([0.2], 0.0, now_s) == 16
    assert seats.observe([], 0.05, now_s + TICK_S) == 16
    assert seats.observe([], 0.2, now_s + 0.11) == 8
    seats_after(seats, 2, now_s + 0.11, first_token_s=0.05)
    assert 8 < seats.count <= 12  # by one while requests come


def test_calm_time_doubles_when_growth_did_not_last() -> None:
    seats = Seats(8, 0.1)
    now_s = seats_after(seats, MIN_CALM_S + TICK_S, 0.0)
    assert (seats.count, seats.calm_s) == (2, MIN_CALM_S)
    seats_after(seats, 0.2, now_s, first_token_s=0.5)
    assert (seats.count, seats.calm_s) == (1, 2 * MIN_CALM_S)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=300), st.integers(1, 64))
def test_seats_stay_between_one_and_the_slots(seen: list[tuple[float, float]], most: int) -> None:
    seats, now_s = Seats(most, 0.2), 0.0
    for first_token_s, wait_s in seen:
        now_s += TICK_S
        before = seats.count
        count = seats.observe([first_token_s], wait_s, now_s)
        assert 1 <= count <= most
        assert wait_s <= 0.2 or count <= before


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"serve": "8000", "engine": "vllm", "base_model": "/m"}, "pattern"),
        ({"serve": "h:70000", "engine": "vllm", "base_model": "/m"}, "at most 65535"),
        ({"serve_args": {"served_model_name": "m"}}, "give its address with serve"),
        ({"beside_url": "http://127.0.0.1:8000", "role": "reserved"}, "shares the trainer's device"),
        ({"beside_ttft_ms": 100}, "name that with beside_url"),
        ({"beside_max_running": 2}, "name that with beside_url"),
        ({"beside_url": "127.0.0.1:8000"}, "pattern"),
        ({"beside_url": "http://user:password@host"}, "pattern"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Settings(token="t", **settings)


@pytest.mark.parametrize("limit_s", [0.0, 0.1])
def test_first_look_at_a_server_with_a_history_is_no_pressure(limit_s: float) -> None:
    serving = Serving(Borrowing(ttft_limit_s=limit_s))
    serving.served(fast=10, slow=90)
    assert not serving.pass_(MIN_CALM_S + 2 * TICK_S)
