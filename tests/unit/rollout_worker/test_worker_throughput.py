from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost.services.rollout_worker.domain.load import DecodeMeter, Throughput
from rlboost.services.rollout_worker.domain.requests import Emission


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


# --- decode steps -------------------------------------------------------------------------------------------------


def emission(sample: int, tokens: int, version: int = 0) -> Emission:
    return Emission(sample, 1, 0, [7] * tokens, [0.0] * tokens, version)


def test_decode_steps_are_those_of_the_sample_with_most_tokens() -> None:
    meter = DecodeMeter(slots=4)
    meter.on_flush([emission(1, 9)], 2, 10.0)
    meter.on_flush([emission(1, 4), emission(2, 4)], 2, 10.2)
    meter.on_flush([emission(1, 6), emission(2, 2), emission(3, 1)], 1, 10.6)
    assert meter.take() == pytest.approx((17 / 10, 0.6 / 10))
    assert meter.take() == (0.0, 0.0), "they count once"


def test_decode_steps_of_a_slow_engine_span_several_flushes() -> None:
    meter = DecodeMeter(slots=4)
    for tick, n in enumerate((1, 0, 0, 1, 0, 0, 1)):
        meter.on_flush([emission(1, n)] if n else [], 1, 0.1 * tick)
    assert meter.take() == pytest.approx((1.0, 0.3))


def test_idle_time_and_weight_updates_are_in_no_decode_step() -> None:
    meter = DecodeMeter(slots=4)
    meter.on_flush([emission(1, 3)], 1, 0.0)
    meter.on_flush([emission(1, 3)], 0, 1.0)  # it ended at an unknown moment
    meter.on_flush([], 1, 9.0)
    meter.on_flush([emission(2, 3)], 1, 9.1)
    meter.on_flush([emission(2, 3, version=1)], 1, 20.0)
    meter.on_flush([emission(2, 5, version=1)], 1, 20.5)
    assert meter.take() == pytest.approx((1.0, 0.1))


def test_time_in_which_only_given_tokens_are_scored_is_in_no_decode_step() -> None:
    meter = DecodeMeter(slots=4)
    meter.on_flush([emission(1, 3)], 1, 0.0)
    meter.on_flush([replace(emission(2, 256), is_forced=True)], 1, 5.0)
    meter.on_flush([emission(3, 1)], 1, 10.0)
    meter.on_flush([emission(3, 2), replace(emission(4, 256), is_forced=True)], 1, 10.4)
    assert meter.take() == pytest.approx((1.0, 0.2))


def test_steps_hold_no_more_tokens_than_the_engine_has_slots() -> None:
    """Each of 16 short samples lasts a quarter of the interval, in which 4 slots take 40 steps."""
    meter = DecodeMeter(slots=4)
    meter.on_flush([emission(0, 10)], 4, 10.0)
    meter.on_flush([emission(number, 10) for number in range(16)], 4, 10.8)
    assert meter.take() == pytest.approx((4.0, 0.02))


def test_accepted_drafts_make_no_decode_steps() -> None:
    meter = DecodeMeter(slots=4)
    meter.on_flush([emission(1, 9)], 2, 10.0, accepted=5)
    meter.on_flush([emission(1, 12), emission(2, 18)], 2, 11.0, accepted=10)
    assert meter.take() == pytest.approx((2.0, 1.0 / 10)), "ten steps of two samples, with ten tokens on top"
    meter.on_flush([emission(1, 3)], 1, 11.5, accepted=-25)
    assert meter.take() == pytest.approx((1.0, 0.5 / 3)), "the counter of a new engine starts again"
