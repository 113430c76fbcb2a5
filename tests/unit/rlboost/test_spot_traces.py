"""Recorded traces are read or refused with a line number; generated ones have the stated statistics."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlboost.shared.errors import ConfigError
from rlboost.simulation.traces import G4DN, FleetEvent, FleetTrace, generate_trace, read_trace


def trace_of(duration_s: float, *events: tuple[float, str]) -> FleetTrace:
    """Return a trace from pairs such as `(60, "+a")`."""
    return FleetTrace(
        tuple(FleetEvent(at_s, "add" if name[0] == "+" else "remove", name[1:]) for at_s, name in events), duration_s
    )


def read_text(folder: Path, text: str) -> FleetTrace:
    path = folder / "trace"
    path.write_text(text)
    return read_trace(path)


# --- formats ----------------------------------------------------------------------------------------------------------


def test_trace_of_events_is_read_in_seconds(tmp_path: Path) -> None:
    trace = read_text(tmp_path, "0,add,node1\n60000,add,node2\n\n90500,remove,node1\n")
    assert trace == trace_of(90.5, (0, "+node1"), (60, "+node2"), (90.5, "-node1"))


def test_trace_of_counts_removes_the_longest_available_instance(tmp_path: Path) -> None:
    lines = "2021-12-11, 11:11:30, 2\n2021-12-11, 11:13:10, 1\n2021-12-12, 11:11:30, 2\n"
    trace = read_text(tmp_path, lines)
    expected = [(0, "+instance-1"), (0, "+instance-2"), (100, "-instance-1"), (86400, "+instance-3")]
    assert trace == trace_of(86400, *expected)


def test_trace_of_availability_has_one_count_per_gap(tmp_path: Path) -> None:
    trace = read_text(tmp_path, '{"metadata": {"gap_seconds": 300}, "data": [0, 1, 1, 0, 2]}')
    expected = [(300, "+instance-1"), (900, "-instance-1"), (1200, "+instance-2"), (1200, "+instance-3")]
    assert trace == trace_of(1500, *expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("0,add,node1\n0,add", "line 2: '0,add' is not of the form time_ms,add|remove,instance"),
        ("0,start,node1", "line 1: '0,start,node1' is not of the form"),
        ("-5,add,node1", "line 1: '-5,add,node1' is not of the form"),
        ("5000,add,a\n\n4000,add,b", "line 3: time 4 s is before the previous event's 5 s"),
        ("0,add,a\n1,add,a", "line 2: a is added while it is available"),
        ("0,add,a\n1,remove,b", "line 2: b is removed, but was not added before"),
        ("2021-12-11, 11:11:30, 2\n2021-12-11, 11:1", "line 2: '2021-12-11, 11:1' is not of the form YYYY-mm-dd"),
        ("2021-13-11, 11:11:30, 2", "line 1: '2021-13-11, 11:11:30, 2' is not of the form YYYY-mm-dd"),
        ("2021-12-11, 11:11:30, 2\n2021-12-11, 11:11:29, 2", "line 2: 2021-12-11 11:11:29 is before the previous"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 0', "JSON: Invalid JSON"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "metadata.gap_seconds"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "data: List should have at least 1 item"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, -1]}', "data.1"),
    ],
)
def test_damaged_trace_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_text(tmp_path, text)
    assert problem in str(error.value)


def test_missing_or_binary_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "missing.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_trace(tmp_path / "binary")


# --- operations -------------------------------------------------------------------------------------------------------


def test_trace_with_events_outside_its_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="the trace ends at 10 s"):
        trace_of(10, (11, "+a"))


def test_between_adds_at_the_start_what_is_available_then() -> None:
    trace = trace_of(100, (0, "+a"), (10, "+b"), (20, "-a"), (50, "+c"), (60, "-b"), (90, "-c"))
    assert trace.between(30, 70) == trace_of(40, (0, "+b"), (20, "+c"), (30, "-b"))
    assert trace.between(20, 500).duration_s == 80


def test_limited_trace_replaces_a_reclaimed_instance_at_once() -> None:
    trace = trace_of(100, (0, "+a"), (0, "+b"), (10, "+c"), (20, "-b"), (30, "-a"), (40, "-c"))
    assert trace.limited(1) == trace_of(100, (0, "+a"), (30, "-a"), (30, "+c"), (40, "-c"))
    assert trace.limited(0).events == ()
    assert trace.limited(3) == trace


def test_sampled_trace_has_the_fraction_of_instances_and_repeats() -> None:
    trace = generate_trace(G4DN, 1)
    half = trace.sampled(0.5, 3)
    instances = {event.instance for event in trace.events}
    assert len({event.instance for event in half.events}) == round(len(instances) / 2)
    assert half == trace.sampled(0.5, 3) != trace.sampled(0.5, 4)


def test_mean_instances_counts_those_available_at_the_end() -> None:
    assert trace_of(100, (0, "+a"), (50, "+b"), (75, "-b")).mean_instances == 1.25


# --- generated --------------------------------------------------------------------------------------------------------


def test_generated_trace_repeats_with_its_seed() -> None:
    assert generate_trace(G4DN, 7) == generate_trace(G4DN, 7) != generate_trace(G4DN, 8)


@pytest.mark.parametrize("change", [{"mean_instances": 0.0}, {"mean_instances": 25.0}, {"mean_life_s": 60.0}])
def test_statistics_that_no_trace_has_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        replace(G4DN, **change)


def test_generated_traces_have_the_stated_statistics() -> None:
    traces = [generate_trace(G4DN, seed) for seed in range(30)]
    assert statistics.mean(trace.mean_instances for trace in traces) == pytest.approx(G4DN.mean_instances, rel=0.1)
    largest = 0
    lives_s: list[float] = []
    at_once: list[int] = []
    for trace in traces:
        started_s: dict[str, float] = {}
        removals: dict[float, int] = {}
        for event in trace.events:
            if event.kind == "add":
                started_s[event.instance] = event.at_s
                largest = max(largest, len(started_s))
            else:
                lives_s.append(event.at_s - started_s.pop(event.instance))
                removals[event.at_s] = removals.get(event.at_s, 0) + 1
        at_once += removals.values()
    assert largest <= G4DN.max_instances
    assert 0.8 < statistics.median(lives_s) / G4DN.median_life_s < 1.0
    assert 0.7 < statistics.mean(lives_s) / G4DN.mean_life_s < 0.9
    single = G4DN.removals_at_once[1] / sum(G4DN.removals_at_once.values())
    assert at_once.count(1) / len(at_once) == pytest.approx(single, abs=0.05)
