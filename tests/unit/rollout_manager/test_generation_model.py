"""How long the generation of a step takes with other numbers of workers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain.windows import Generation


def test_window_closes_where_workers_generate_all_during_training() -> None:
    generation = Generation(latency_s=0.0, work_s=400.0)
    assert generation.step_s(workers=4, reserved=2, train_s=100.0) == 100.0
    assert generation.step_s(workers=2, reserved=2, train_s=100.0) == 150.0
    assert generation.step_s(workers=0, reserved=2, train_s=100.0) == 300.0
    assert generation.step_s(workers=0, reserved=0, train_s=100.0) == math.inf


def test_latency_keeps_the_window_open_where_work_alone_would_not() -> None:
    generation = Generation(latency_s=60.0, work_s=400.0)
    assert generation.duration_s(4) == 160.0
    # All six take 126.7 s for everything; 100 of the 160 s that four take alone pass during training.
    assert generation.window_s(workers=4, reserved=2, train_s=100.0) == pytest.approx((60 + 400 / 6) * 60 / 160)
    assert generation.window_s(workers=10, reserved=2, train_s=100.0) == 0.0


@given(latency_s=st.floats(0.0, 1e4), work_s=st.floats(1.0, 1e5), train_s=st.floats(1.0, 1e4), n=st.integers(1, 99))
def test_more_workers_never_make_a_step_longer(latency_s: float, work_s: float, train_s: float, n: int) -> None:
    generation = Generation(latency_s, work_s)
    before_s, after_s = (generation.step_s(workers, 3, train_s) for workers in (n, n + 1))
    assert after_s <= before_s * (1 + 1e-9)


def test_workers_are_worth_having_until_no_window_is_needed() -> None:
    assert Generation(0.0, 400.0).workers_worth_having(reserved=2, train_s=100.0) == 4
    assert Generation(60.0, 400.0).workers_worth_having(reserved=2, train_s=100.0) == 10
    assert Generation(0.0, 400.0).workers_worth_having(reserved=0, train_s=100.0) == 4
    assert Generation(0.0, 0.0).workers_worth_having(reserved=2, train_s=100.0) == 0


def test_few_workers_are_worth_having_where_latency_dominates() -> None:
    assert Generation(500.0, 400.0).workers_worth_having(reserved=2, train_s=100.0) < 10
    assert Generation(500.0, 0.0).workers_worth_having(reserved=2, train_s=100.0) == 1, "it generates during training"
