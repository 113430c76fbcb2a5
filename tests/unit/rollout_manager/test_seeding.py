"""The seeding window: when it closes, ends and reopens, and how its length is tuned."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.windows import (
    FLEET_CHANGE_DIVISOR,
    NEWEST_STEP_WEIGHT,
    WAIT_DIFFERENCE_DIVISOR,
    Generation,
    StepMeter,
    StepSnapshot,
    StepTimes,
    Window,
    WindowTuner,
    target_workers,
)


def snapshot(now: float, **changes: int) -> StepSnapshot:
    fields: dict[str, Any] = {
        "in_flight": 10,
        "requested": 12,
        "reserved_awake": 1,
        "reserved": 1,
        "preemptible_ready": 2,
        "preemptible": 2,
        **changes,
    }
    return StepSnapshot(now=now, **fields)


def open_window(length_s: float | None = 5.0) -> Window:
    window = Window(step=3, length_s=length_s)
    window.on_placed(100.0)
    return window


def test_window_closes_after_its_length_and_ends_when_suspended() -> None:
    window = open_window()
    assert window.advance(snapshot(104.9)) is None
    assert window.advance(snapshot(105.0)) == "close"
    assert window.advance(snapshot(105.1)) is None
    assert window.advance(snapshot(105.2, reserved_awake=0)) == "end"
    assert window.reason == "window"


def test_window_begins_with_the_first_placement() -> None:
    assert Window(0, 5.0).advance(snapshot(1e9)) is None


def test_window_without_preemptible_workers_lasts_until_finished() -> None:
    window = open_window()
    assert window.advance(snapshot(1e9, preemptible_ready=0, preemptible=0)) is None
    assert window.advance(snapshot(1e9, preemptible_ready=0, preemptible=0, in_flight=0)) == "close"
    assert window.reason == "finished"


def test_window_stays_open_while_workers_are_loading() -> None:
    assert open_window().advance(snapshot(200.0, preemptible_ready=0)) is None


def test_window_closes_early_when_all_samples_are_finished() -> None:
    assert open_window().advance(snapshot(101.0, in_flight=0)) == "close"


def test_window_without_reserved_workers_ends_at_once() -> None:
    window = open_window()
    assert window.advance(snapshot(100.0, reserved=0, reserved_awake=0)) == "close"
    assert window.reason == "no_reserved"
    assert window.advance(snapshot(100.0, reserved=0, reserved_awake=0)) == "end"


def test_window_reopens_when_the_last_preemptible_worker_leaves() -> None:
    window = open_window()
    window.advance(snapshot(105.0))
    window.advance(snapshot(105.0, reserved_awake=0))
    assert window.advance(snapshot(106.0, reserved_awake=0)) is None
    assert window.advance(snapshot(107.0, reserved_awake=0, preemptible=0, preemptible_ready=0)) == "reopen"
    assert window.phase == "open"
    assert window.advance(snapshot(108.0, preemptible_ready=1)) is None
    assert window.advance(snapshot(112.1, preemptible_ready=1)) == "close"


def test_reopened_window_keeps_its_first_length() -> None:
    window = open_window()
    window.advance(snapshot(105.0))
    window.advance(snapshot(105.0, in_flight=0, reserved_awake=0))
    assert window.lasted_s == 5.0
    # A replacement group is requested late, and no preemptible worker remains.
    assert (
        window.advance(snapshot(107.0, in_flight=1, reserved_awake=0, preemptible=0, preemptible_ready=0)) == "reopen"
    )
    assert window.advance(snapshot(107.5, in_flight=0, preemptible=0, preemptible_ready=0)) == "close"
    assert window.advance(snapshot(107.6, in_flight=0, reserved_awake=0, preemptible=0, preemptible_ready=0)) == "end"
    assert window.lasted_s == 5.0


def test_window_reopens_when_remaining_workers_are_too_slow() -> None:
    window = open_window()
    window.advance(snapshot(105.0))
    window.advance(snapshot(105.0, reserved_awake=0))
    assert window.advance(snapshot(106.0, reserved_awake=0, preemptible=1)) is None
    assert window.advance(snapshot(107.0, reserved_awake=0, preemptible=1, too_slow=True)) == "reopen"


def test_window_stays_open_while_remaining_workers_are_too_slow() -> None:
    assert open_window().advance(snapshot(106.0, preemptible=1, too_slow=True)) is None


def test_first_window_lasts_until_half_of_the_step_is_finished() -> None:
    window = open_window(None)
    assert window.advance(snapshot(1e6, in_flight=7)) is None
    assert window.advance(snapshot(1e6, in_flight=6)) == "close"


def test_window_of_zero_length_uses_no_reserved_engines() -> None:
    window = Window(step=0, length_s=0.0)
    assert not window.uses_reserved(preemptible=1)
    assert window.uses_reserved(preemptible=0)
    assert window.advance(snapshot(0.0)) == "close"


# --- the length ---


def step_times(**changes: Any) -> StepTimes:
    fields = {
        "window_s": 10.0,
        "train_wait_s": 0.0,
        "remote_wait_s": 0.0,
        "train_s": 20.0,
        "step_s": 60.0,
        "fleet": 4,
        "fleet_mean": 4.0,
        "steady": True,
        "reserved": 2,
        "generation": Generation(latency_s=0.0, work_s=220.0),
        "tokens": 6000,
        **changes,
    }
    return StepTimes(**fields)


def test_window_grows_when_trainer_waits_and_shrinks_when_workers_wait() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(train_wait_s=12.0))
    assert tuner.window_s == pytest.approx(10.0 + 12.0 / WAIT_DIFFERENCE_DIVISOR)
    tuner = WindowTuner()
    tuner.learn(step_times(remote_wait_s=8.0))
    assert tuner.window_s == pytest.approx(10.0 - 8.0 / WAIT_DIFFERENCE_DIVISOR)


def test_minimum_wait_of_the_workers_does_not_count() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(train_wait_s=10.0, remote_wait_s=15.0))
    assert tuner.min_wait_s == 15.0
    assert tuner.window_s == pytest.approx(10.0 + 10.0 / WAIT_DIFFERENCE_DIVISOR)
    tuner.learn(step_times(train_wait_s=0.0, remote_wait_s=15.0))
    assert tuner.window_s == 10.0


def test_one_step_at_most_halves_or_doubles_the_window() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(remote_wait_s=59.0))
    assert tuner.window_s == 5.0
    tuner.learn(step_times(train_wait_s=590.0, step_s=600.0))
    assert tuner.window_s == 160.0
    tuner.learn(step_times(train_wait_s=59.0, window_s=20.0))
    assert tuner.window_s == 40.0


def test_step_with_fleet_changes_counts_less() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(train_wait_s=12.0, steady=False))
    assert tuner.window_s == pytest.approx(10.0 + 12.0 / WAIT_DIFFERENCE_DIVISOR / FLEET_CHANGE_DIVISOR)


def test_small_difference_of_waits_changes_nothing() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(train_wait_s=2.0))
    assert tuner.window_s == 10.0


def test_window_is_remembered_for_each_fleet_size() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(fleet=4, window_s=10.0))
    tuner.learn(step_times(fleet=2, fleet_mean=2.0, window_s=30.0))
    assert tuner.choose(4, 2) == (10.0, "memory")
    assert tuner.choose(2, 2) == (30.0, "memory")
    # Of 220 worker-seconds, two workers do 40 in the 20 s of training and three 60; the rest is done by all.
    window_s, source = tuner.choose(3, 2)
    assert window_s == pytest.approx(30.0 + 160 / 5 - 180 / 4)
    assert source == "predicted"


def test_window_of_a_larger_fleet_is_at_least_zero() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times())
    assert tuner.choose(20, 2) == (0.0, "predicted")


def test_step_with_fleet_changes_is_not_remembered() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(steady=False))
    assert tuner.choose(4, 2) == (10.0, "predicted")


def test_window_of_a_new_job_is_measured() -> None:
    assert WindowTuner().choose(3, 1) == (None, "first")


def test_target_workers_is_generation_work_per_training_time() -> None:
    tuner = WindowTuner()
    told = tuner.learn(step_times(generation=Generation(0.0, 220.0), train_s=55.0))
    assert tuner.target_workers == told["target_workers"] == 4


def test_model_of_the_generation_is_smoothed_over_steps() -> None:
    tuner = WindowTuner()
    tuner.learn(step_times(generation=Generation(10.0, 100.0)))
    tuner.learn(step_times(generation=Generation(30.0, 200.0)))
    assert tuner.generation == Generation(10.0 + NEWEST_STEP_WEIGHT * 20.0, 100.0 + NEWEST_STEP_WEIGHT * 100.0)


def test_tokens_of_a_step_are_known_whatever_workers_it_was_measured_with() -> None:
    """12,000 tokens each: by workers of 100 tokens per second, then of 400, then of an unknown throughput."""
    tuner = WindowTuner()
    for work_s, tokens_per_s in ((120.0, 100.0), (30.0, 400.0), (30.0, 400.0)):
        tuner.learn(step_times(generation=Generation(0.0, work_s), worker_tokens_per_s=tokens_per_s))
        assert tuner.work_s * tuner.worker_tokens_per_s == pytest.approx(12_000.0)
    before = tuner.worker_tokens_per_s
    assert 100.0 < before < 400.0
    tuner.learn(step_times(generation=Generation(0.0, tuner.work_s)))
    assert tuner.worker_tokens_per_s == before


def test_target_workers_of_several_jobs_is_the_sum() -> None:
    assert target_workers([WindowTuner(), WindowTuner()]) is None
    assert target_workers([WindowTuner(target_workers=1), WindowTuner(), WindowTuner(target_workers=3)]) == 4


def test_window_update_reports_its_inputs() -> None:
    told = WindowTuner().learn(step_times(train_wait_s=12.0))
    assert {"train_wait_s", "remote_wait_s", "step_s", "fleet_mean", "window_was_s", "change_s", "window_s"} <= set(
        told
    )


def test_meter_counts_idle_time_only_with_preemptible_workers() -> None:
    meter = StepMeter(began_at=0.0, updated_at=0.0, tokens_before=100)
    meter.update(1.0, fleet=0, reserved=1, working=True)
    meter.update(4.0, fleet=2, reserved=1, working=True)
    meter.update(6.0, fleet=2, reserved=1, working=False)
    measured = meter.measure(2.5, 0.5, 3.0, tokens=700)
    assert (measured.remote_wait_s, measured.step_s) == (2.0, 6.0)
    assert measured.fleet_mean == pytest.approx(10 / 6)
    assert measured.tokens == 600
    assert not measured.steady
