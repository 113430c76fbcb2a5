"""A spot trace: which instances are available at which time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An instance becomes available or is reclaimed."""

    at_s: float
    """Seconds after the start of the trace."""
    kind: Literal["add", "remove"]
    instance: str


@dataclass(frozen=True, slots=True)
class FleetTrace:
    """Events in order of time. An instance is added before it is removed, and not added while it is available."""

    events: tuple[FleetEvent, ...]
    duration_s: float

    def __post_init__(self) -> None:
        """Check the order.

        Raises:
            ValueError: an event is out of order or outside the trace; names it.

        """
        if found := first_problem(self.events):
            index, problem = found
            raise ValueError(f"event {index}: {problem}")
        if self.events and self.events[-1].at_s > self.duration_s:
            raise ValueError(
                f"the last event is at {self.events[-1].at_s:g} s, but the trace ends at {self.duration_s:g} s"
            )

    @classmethod
    def constant(cls, n: int, duration_s: float) -> FleetTrace:
        """Return the trace of `n` instances that are available all the time."""
        return cls(tuple(FleetEvent(0.0, "add", f"instance-{i + 1}") for i in range(n)), duration_s)

    @property
    def mean_instances(self) -> float:
        """Return the number of available instances, averaged over time."""
        instance_s = sum(end_s - start_s for start_s, end_s in self.intervals())
        return instance_s / self.duration_s if self.duration_s else 0.0

    def sampled(self, fraction: float, seed: int) -> FleetTrace:
        """Return the trace of a random part of the instances."""
        instances = sorted({event.instance for event in self.events})
        chosen = set(random.Random(seed).sample(instances, round(fraction * len(instances))))  # noqa: S311 - no secret
        return FleetTrace(tuple(event for event in self.events if event.instance in chosen), self.duration_s)

    def between(self, start_s: float, end_s: float) -> FleetTrace:
        """Return a part of the trace; what is available at its start is added at 0."""
        present: dict[str, None] = {}
        events = []
        for event in self.events:
            if event.at_s <= start_s:
                _apply(event, present)
            elif event.at_s < end_s:
                events.append(FleetEvent(event.at_s - start_s, event.kind, event.instance))
        first = [FleetEvent(0.0, "add", instance) for instance in present]
        return FleetTrace((*first, *events), min(end_s, self.duration_s) - start_s)

    def next_available_s(self, at_s: float) -> float | None:
        """Return the first moment from `at_s` on at which an instance is available; None if none is."""
        return min(
            (max(at_s, start_s) for start_s, end_s in self.intervals() if end_s > max(at_s, start_s)), default=None
        )

    def limited(self, n: int) -> FleetTrace:
        """Return the trace of a fleet of at most `n` instances.

        Of those available, the ones that came first are used. When one is reclaimed, the next starts at once.
        """
        available: dict[str, None] = {}
        used: dict[str, None] = {}
        events = []
        for event in self.events:
            _apply(event, available)
            chosen = dict.fromkeys(list(available)[:n])
            events += [FleetEvent(event.at_s, "remove", name) for name in used if name not in chosen]
            events += [FleetEvent(event.at_s, "add", name) for name in chosen if name not in used]
            used = chosen
        return FleetTrace(tuple(events), self.duration_s)

    def intervals(self) -> Iterator[tuple[float, float]]:
        """Yield from when until when each instance is available; to the end of the trace if it is not reclaimed."""
        started_s: dict[str, float] = {}
        for event in self.events:
            if event.kind == "add":
                started_s[event.instance] = event.at_s
            else:
                yield started_s.pop(event.instance), event.at_s
        for start_s in started_s.values():
            yield start_s, self.duration_s


def first_problem(events: Iterable[FleetEvent]) -> tuple[int, str] | None:
    """Return the index of the first event that is out of order, and why; None if all are in order."""
    available: set[str] = set()
    last_s = 0.0
    for index, event in enumerate(events):
        if problem := _problem(event, available, last_s):
            return index, problem
        last_s = event.at_s
    return None


def _problem(event: FleetEvent, available: set[str], last_s: float) -> str:
    """Return why an event cannot follow the ones before, or an empty string after applying it to `available`."""
    if event.at_s < last_s:
        return f"time {event.at_s:g} s is before the previous event's {last_s:g} s: sort the events by time"
    is_available = event.instance in available
    if event.kind == "add" and is_available:
        return f"{event.instance} is added while it is available: remove it first, or name the new one differently"
    if event.kind == "remove" and not is_available:
        return f"{event.instance} is removed, but was not added before"
    available ^= {event.instance}
    return ""


def _apply(event: FleetEvent, available: dict[str, None]) -> None:
    if event.kind == "add":
        available[event.instance] = None
    else:
        available.pop(event.instance)
