from __future__ import annotations

import pytest

from rlboost.services.rollout_worker.domain.throughput import Throughput


def test_speed_is_that_of_the_last_seconds() -> None:
    speed = Throughput()
    assert speed.update(0, 10.0) == 0.0
    assert speed.update(50, 10.5) == pytest.approx(100.0)
    for tick in range(1, 21):
        latest = speed.update(50 + 5 * tick, 10.5 + 0.5 * tick)
    assert latest == pytest.approx(10.0)


def test_an_idle_worker_soon_reports_no_speed() -> None:
    speed = Throughput()
    speed.update(0, 0.0)
    speed.update(1000, 1.0)
    for tick in range(10):
        latest = speed.update(1000, 1.5 + 0.5 * tick)
    assert latest == 0.0


def test_counter_reset_restarts_the_measurement() -> None:
    speed = Throughput()
    speed.update(1000, 0.0)
    assert speed.update(0, 1.0) == 0.0
    assert speed.update(10, 2.0) == pytest.approx(10.0)
