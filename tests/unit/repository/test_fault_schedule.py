from __future__ import annotations

from typing import get_args

from benchmarks.chaos.schedule import ROLES, Kind, plan

KINDS: tuple[Kind, ...] = get_args(Kind)


def test_plan_depends_on_the_seed_alone() -> None:
    assert plan(1, 300, KINDS, every_s=5) == plan(1, 300, set(KINDS), every_s=5)
    assert plan(1, 300, KINDS, every_s=5) != plan(2, 300, KINDS, every_s=5)


def test_plan_has_each_kind_before_any_twice() -> None:
    for seed in range(20):
        faults = plan(seed, 300, KINDS, every_s=5)
        assert {fault.kind for fault in faults[: len(KINDS)]} == set(KINDS)
        times = [fault.at_s for fault in faults]
        assert times == sorted(times)
        assert times[-1] < 300
        assert 30 <= len(faults) <= 100


def test_plan_aims_signals_and_bounds_durations() -> None:
    faults = [fault for seed in range(50) for fault in plan(seed, 300, KINDS, every_s=5)]
    assert {fault.role for fault in faults if fault.kind == "stop"} == set(ROLES)
    assert not any(fault.role for fault in faults if fault.kind == "partition")
    assert all(1 <= fault.duration_s <= 60 for fault in faults if fault.kind == "stop")
    assert not any(fault.duration_s for fault in faults if fault.kind in {"kill", "flip_bytes", "kill_all"})


def test_plan_steps_clocks_forward_and_back_by_up_to_ten_minutes() -> None:
    faults = [fault for seed in range(50) for fault in plan(seed, 300, KINDS, every_s=5)]
    steps = [fault.offset_s for fault in faults if fault.kind == "step_clock"]
    assert all(10 <= abs(step) <= 600 for step in steps)
    assert {step > 0 for step in steps} == {True, False}
    assert not any(fault.offset_s for fault in faults if fault.kind != "step_clock")


def test_plan_without_kinds_is_empty() -> None:
    assert plan(0, 300, (), every_s=5) == []
