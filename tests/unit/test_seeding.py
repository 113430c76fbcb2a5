"""The seeding window: when it closes, ends and opens again, and how long it should be."""

from __future__ import annotations

import pytest

from services.rollout_manager.domain.offload import ETA, UNSTEADY, Meter, Offload, Seen, wanted
from services.rollout_manager.domain.seeding import View, Window


def view(now: float, **changes: int) -> View:
    fields = {
        "live": 10,
        "asked": 12,
        "reserved_awake": 1,
        "reserved": 1,
        "preemptible_ready": 2,
        "preemptible": 2,
        **changes,
    }
    return View(now=now, **fields)


def open_window(length_s: float | None = 5.0) -> Window:
    window = Window(step=3, length_s=length_s)
    window.placed(100.0)
    return window


def test_the_window_closes_after_its_length_and_ends_when_the_reserved_engines_sleep() -> None:
    window = open_window()
    assert window.advance(view(104.9)) is None
    assert window.advance(view(105.0)) == "close"
    assert window.advance(view(105.1)) is None
    assert window.advance(view(105.2, reserved_awake=0)) == "end"
    assert window.reason == "window"


def test_the_window_does_not_begin_before_anything_is_placed() -> None:
    assert Window(0, 5.0).advance(view(1e9)) is None


def test_without_preemptible_workers_the_window_is_endless() -> None:
    window = open_window()
    assert window.advance(view(1e9, preemptible_ready=0, preemptible=0)) is None
    assert window.advance(view(1e9, preemptible_ready=0, preemptible=0, live=0)) == "close"
    assert window.reason == "finished"


def test_workers_that_are_still_loading_do_not_close_the_window() -> None:
    assert open_window().advance(view(200.0, preemptible_ready=0)) is None


def test_the_window_closes_early_when_everything_is_generated() -> None:
    assert open_window().advance(view(101.0, live=0)) == "close"


def test_without_reserved_workers_the_device_is_the_trainer_s_at_once() -> None:
    window = open_window()
    assert window.advance(view(100.0, reserved=0, reserved_awake=0)) == "close"
    assert window.reason == "no_reserved"
    assert window.advance(view(100.0, reserved=0, reserved_awake=0)) == "end"


def test_the_window_opens_again_when_the_last_preemptible_worker_goes() -> None:
    window = open_window()
    window.advance(view(105.0))
    window.advance(view(105.0, reserved_awake=0))
    assert window.advance(view(106.0, reserved_awake=0)) is None
    assert window.advance(view(107.0, reserved_awake=0, preemptible=0, preemptible_ready=0)) == "reopen"
    assert window.phase == "open"
    assert window.advance(view(108.0, preemptible_ready=1)) is None
    assert window.advance(view(112.1, preemptible_ready=1)) == "close"


def test_a_window_that_opened_again_is_as_long_as_it_was_the_first_time() -> None:
    window = open_window()
    window.advance(view(105.0))
    window.advance(view(105.0, live=0, reserved_awake=0))
    assert window.lasted_s == 5.0
    # Late, a prompt is asked for in place of another, and nobody preemptible is left.
    assert window.advance(view(107.0, live=1, reserved_awake=0, preemptible=0, preemptible_ready=0)) == "reopen"
    assert window.advance(view(107.5, live=0, preemptible=0, preemptible_ready=0)) == "close"
    assert window.advance(view(107.6, live=0, reserved_awake=0, preemptible=0, preemptible_ready=0)) == "end"
    assert window.lasted_s == 5.0


def test_the_window_opens_again_when_those_that_are_left_would_take_too_long() -> None:
    window = open_window()
    window.advance(view(105.0))
    window.advance(view(105.0, reserved_awake=0))
    assert window.advance(view(106.0, reserved_awake=0, preemptible=1)) is None
    assert window.advance(view(107.0, reserved_awake=0, preemptible=1, left_behind=True)) == "reopen"


def test_the_window_stays_open_while_those_that_are_left_would_take_too_long() -> None:
    assert open_window().advance(view(106.0, preemptible=1, left_behind=True)) is None


def test_the_first_window_of_a_job_lasts_until_half_of_the_step_is_finished() -> None:
    window = open_window(None)
    assert window.advance(view(1e6, live=7)) is None
    assert window.advance(view(1e6, live=6)) == "close"


def test_a_window_of_no_length_leaves_the_reserved_engines_asleep_while_there_is_a_preemptible_worker() -> None:
    window = Window(step=0, length_s=0.0)
    assert not window.seeds(preemptible=1)
    assert window.seeds(preemptible=0)
    assert window.advance(view(0.0)) == "close"


# --- how long it should be ---


def seen(**changes: float) -> Seen:
    fields = {
        "window_s": 10.0,
        "train_wait_s": 0.0,
        "remote_wait_s": 0.0,
        "train_s": 20.0,
        "step_s": 60.0,
        "remote_s": 50.0,
        "fleet": 4,
        "fleet_mean": 4.0,
        "steady": True,
        "reserved": 2,
        **changes,
    }
    return Seen(**fields)  # type: ignore[arg-type]  # whole numbers are written as such above


def test_the_window_grows_when_the_trainer_waits_and_shrinks_when_the_workers_do() -> None:
    offload = Offload()
    offload.learn(seen(train_wait_s=12.0))
    assert offload.window_s == pytest.approx(10.0 + 12.0 / ETA)
    offload = Offload()
    offload.learn(seen(remote_wait_s=8.0))
    assert offload.window_s == pytest.approx(10.0 - 8.0 / ETA)


def test_what_the_workers_wait_in_any_case_is_not_weighed_against_the_trainer_s_wait() -> None:
    offload = Offload()
    offload.learn(seen(train_wait_s=10.0, remote_wait_s=15.0))
    assert offload.least_wait_s == 15.0
    assert offload.window_s == pytest.approx(10.0 + 10.0 / ETA)
    offload.learn(seen(train_wait_s=0.0, remote_wait_s=15.0))
    assert offload.window_s == 10.0


def test_one_step_halves_or_doubles_the_window_at_most() -> None:
    offload = Offload()
    offload.learn(seen(remote_wait_s=59.0))
    assert offload.window_s == 5.0
    offload.learn(seen(train_wait_s=590.0, step_s=600.0))
    assert offload.window_s == 160.0
    offload.learn(seen(train_wait_s=59.0, window_s=20.0))
    assert offload.window_s == 40.0


def test_a_step_in_which_workers_came_or_went_teaches_less() -> None:
    offload = Offload()
    offload.learn(seen(train_wait_s=12.0, steady=False))
    assert offload.window_s == pytest.approx(10.0 + 12.0 / ETA / UNSTEADY)


def test_a_difference_that_is_small_beside_the_step_changes_nothing() -> None:
    offload = Offload()
    offload.learn(seen(train_wait_s=2.0))
    assert offload.window_s == 10.0


def test_what_was_learnt_for_a_fleet_size_comes_back_with_it() -> None:
    offload = Offload()
    offload.learn(seen(fleet=4, window_s=10.0))
    offload.learn(seen(fleet=2, window_s=30.0))
    assert offload.choose(4) == (10.0, "memory")
    assert offload.choose(2) == (30.0, "memory")
    assert offload.choose(3) == (20.0, "between")
    assert offload.choose(9) == (30.0, "carried")


def test_a_step_in_which_workers_came_or_went_is_not_remembered_for_a_size() -> None:
    offload = Offload()
    offload.learn(seen(steady=False))
    assert offload.choose(4) == (10.0, "carried")


def test_a_job_that_has_seen_nothing_measures_first() -> None:
    assert Offload().choose(3) == (None, "first")


def test_the_wanted_fleet_is_the_work_of_generation_in_times_of_training() -> None:
    offload = Offload()
    told = offload.learn(seen(remote_s=50.0, fleet_mean=4.0, window_s=10.0, reserved=2, train_s=55.0))
    assert offload.wanted == pytest.approx((50.0 * 4.0 + 10.0 * 2) / 55.0)
    assert told["wanted"] == 4


def test_the_wanted_fleet_of_several_jobs_is_the_sum() -> None:
    assert wanted([Offload(), Offload()]) is None
    assert wanted([Offload(wanted=1.2), Offload(), Offload(wanted=2.2)]) == 4


def test_every_decision_tells_its_inputs() -> None:
    told = Offload().learn(seen(train_wait_s=12.0))
    assert {"train_wait_s", "remote_wait_s", "step_s", "fleet_mean", "window_was_s", "change_s", "window_s"} <= set(
        told
    )


def test_the_meter_counts_idle_time_only_while_somebody_preemptible_is_there() -> None:
    meter = Meter(began_at=0.0, at=0.0)
    meter.update(1.0, fleet=0, reserved=1, working=True)
    meter.update(4.0, fleet=2, reserved=1, working=True)
    meter.update(6.0, fleet=2, reserved=1, working=False)
    measured = meter.seen(2.5, 0.5, 3.0)
    assert (measured.remote_s, measured.remote_wait_s, measured.step_s) == (3.0, 2.0, 6.0)
    assert measured.fleet_mean == pytest.approx(10 / 6)
    assert not measured.steady
