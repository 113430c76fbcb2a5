"""Placement and the seeding window, as plain decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.placement import capacity, place
from services.rollout_manager.domain.seeding import View, Window
from shared.messages import WorkerJoined


def worker(name: str, slots: int, held: int = 0) -> Worker:
    joined = WorkerJoined(
        worker=name, role="preemptible", kind="k", slots=slots, host="h", pid=1, price_per_hour=0.0, at=0.0
    )
    return Worker(joined, 0.0, samples=set(range(1000, 1000 + held)))


def test_samples_go_to_the_worker_with_the_fewest_pending() -> None:
    chosen = place([1, 2, 3], [worker("full", 4, held=4), worker("free", 4, held=2)])
    assert chosen["free"][:2] == [1, 2]


def test_the_less_loaded_of_two_with_free_slots_gets_more() -> None:
    chosen = place(range(6), [worker("a", 8, held=6), worker("b", 8)])
    assert len(chosen["b"]) == 6
    assert "a" not in chosen


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 80)), max_size=6), st.integers(0, 200))
def test_nobody_gets_more_than_fits_and_nothing_waits_beside_room(shape: list[tuple[int, int]], n: int) -> None:
    workers = [worker(f"w{i}", slots, held) for i, (slots, held) in enumerate(shape)]
    chosen = place(range(n), workers)
    placed = [sample for samples in chosen.values() for sample in samples]
    room = sum(max(0, capacity(w) - len(w.samples)) for w in workers)
    assert sorted(placed) == list(range(min(n, room)))
    for w in workers:
        if got := chosen.get(w.id):
            assert len(w.samples) + len(got) <= capacity(w)


def view(now: float, **changes: int) -> View:
    fields = {"live": 10, "reserved_awake": 1, "reserved": 1, "preemptible_ready": 2, "preemptible": 2, **changes}
    return View(now=now, **fields)


def open_window(length_s: float = 5.0) -> Window:
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
