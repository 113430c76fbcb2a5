"""Spot traces: when instances became available and were reclaimed. Recorded ones are read, others generated."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from rlboost.shared.errors import ConfigError
from rlboost.shared.validation import first_error

# --- A spot trace: which instances are available at which time --------------------------------------------------------


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


# --- Reads recorded spot traces. The format is recognized by the content ----------------------------------------------
# - Events, as the Bamboo project publishes them: lines `time_ms,add,instance` and `time_ms,remove,instance`.
# - Counts, as in a log of Google Cloud instances: lines `YYYY-mm-dd, HH:MM:SS, count`.
# - Availability, as the SkyPilot project publishes it: `{"metadata": {"gap_seconds": 300}, "data": [count, ...]}`.
#
# A log of counts does not tell which instance was reclaimed: it is taken to be the one available for longest.


_EVENT = re.compile(r"(\d+),(add|remove),(\S+)")
_COUNT = re.compile(r"(\d{4}-\d\d-\d\d), ?(\d\d:\d\d:\d\d), ?(\d+)")


class _Metadata(BaseModel):
    gap_seconds: float = Field(gt=0)


class _Availability(BaseModel):
    metadata: _Metadata
    data: list[NonNegativeInt] = Field(min_length=1)


def read_trace(path: Path) -> FleetTrace:
    """Read a recorded trace.

    Raises:
        ConfigError: the file cannot be read, is empty, or is not a trace; names the line.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}: name a file that exists") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not text: use CSV or JSON") from error
    if not text.strip():
        raise ConfigError(f"trace {path} is empty: record it again")
    if text.lstrip().startswith("{"):
        return _availability(path, text)
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return _counts(path, lines) if _COUNT.fullmatch(lines[0][1]) else _event_lines(path, lines)


def trace_segment(path: Path | None, *, sample: float, start_h: float, hours: float, limit: int) -> FleetTrace:
    """Return a part of a recorded trace, or without a path of one that resembles Bamboo's.

    Args:
        path: a recorded trace.
        sample: fraction of its instances that is used.
        start_h: hour of the trace at which the part begins.
        hours: its duration.
        limit: maximum number of instances at a time.

    Raises:
        ConfigError: the file is no trace, or the trace ends before `start_h`.

    """
    whole = read_trace(path) if path else generate_trace(G4DN, seed=0)
    if start_h * 3600 >= whole.duration_s:
        raise ConfigError(f"--start {start_h:g}: the trace has {whole.duration_s / 3600:.1f} hours")
    return whole.sampled(sample, seed=0).between(start_h * 3600, (start_h + hours) * 3600).limited(limit)


def _event_lines(path: Path, lines: list[tuple[int, str]]) -> FleetTrace:
    events = []
    for number, line in lines:
        if not (match := _EVENT.fullmatch(line)):
            raise ConfigError(f"trace {path}, line {number}: {line!r} is not of the form time_ms,add|remove,instance")
        events.append(FleetEvent(int(match[1]) / 1000, "add" if match[2] == "add" else "remove", match[3]))
    if found := first_problem(events):
        index, problem = found
        raise ConfigError(f"trace {path}, line {lines[index][0]}: {problem}")
    return FleetTrace(tuple(events), events[-1].at_s)


def _counts(path: Path, lines: list[tuple[int, str]]) -> FleetTrace:
    times_s: list[float] = []
    counts: list[int] = []
    began = None
    for number, line in lines:
        try:
            match = _COUNT.fullmatch(line)
            at = datetime.fromisoformat(f"{match[1]}T{match[2]}") if match else None
        except ValueError:  # e.g. month 13
            at = None
        if match is None or at is None:
            raise ConfigError(f"trace {path}, line {number}: {line!r} is not of the form YYYY-mm-dd, HH:MM:SS, count")
        began = began or at
        at_s = (at - began).total_seconds()
        if times_s and at_s < times_s[-1]:
            raise ConfigError(f"trace {path}, line {number}: {at} is before the previous line: sort the lines by time")
        times_s.append(at_s)
        counts.append(int(match[3]))
    return _trace_of_counts(zip(times_s, counts, strict=True), times_s[-1])


def _availability(path: Path, text: str) -> FleetTrace:
    try:
        found = _Availability.model_validate_json(text)
    except ValidationError as error:
        form = '{"metadata": {"gap_seconds": seconds}, "data": [count, ...]}'
        problem = first_error(error, "JSON")
        raise ConfigError(f"trace {path}: {problem}: it is not of the form {form}") from error
    gap_s = found.metadata.gap_seconds
    return _trace_of_counts(((i * gap_s, count) for i, count in enumerate(found.data)), len(found.data) * gap_s)


def _trace_of_counts(counts: Iterable[tuple[float, int]], duration_s: float) -> FleetTrace:
    events: list[FleetEvent] = []
    first, after_last = 1, 1  # numbers of the available instances
    for at_s, count in counts:
        while after_last - first > count:
            events.append(FleetEvent(at_s, "remove", f"instance-{first}"))
            first += 1
        while after_last - first < count:
            events.append(FleetEvent(at_s, "add", f"instance-{after_last}"))
            after_last += 1
    return FleetTrace(tuple(events), duration_s)


# --- Generates spot traces that resemble a recorded one ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """What a generated trace has in common with a recorded one."""

    duration_s: float
    mean_instances: float
    max_instances: int
    median_life_s: float
    mean_life_s: float
    """Above the median: the distribution of lives has a long tail."""
    removals_at_once: Mapping[int, int]
    """Number of instances reclaimed at one time -> how often that was seen."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: no trace has these statistics.

        """
        if not (0 < self.mean_instances <= self.max_instances and self.duration_s > 0):
            raise ValueError("mean_instances must be above 0 and at most max_instances, and duration_s above 0")
        if not 0 < self.median_life_s <= self.mean_life_s:
            raise ValueError("median_life_s must be above 0, and mean_life_s at least as long")


G4DN = TraceStatistics(
    duration_s=10.8 * 3600,
    mean_instances=12.6,
    max_instances=24,
    median_life_s=61 * 60,
    mean_life_s=99 * 60,
    removals_at_once=MappingProxyType({1: 31, 2: 12, 3: 2, 4: 2, 5: 1}),
)
"""Statistics of the trace of AWS g4dn instances that the Bamboo project published (MIT license; NSDI 2023)."""


def generate_trace(statistics: TraceStatistics, seed: int) -> FleetTrace:
    """Return a random trace, the same for the same seed.

    Lives follow a log-normal distribution with the given median and mean. Additions are a Poisson process at the rate
    that keeps the mean number of instances. Instances whose lives end around the same time are reclaimed together.
    The lives seen within one trace are shorter on average: the longest begin before it or end after it.
    """
    return _Generator(statistics, random.Random(seed)).run()  # noqa: S311 - not a secret


class _Generator:
    def __init__(self, statistics: TraceStatistics, draw: random.Random) -> None:
        self._statistics = statistics
        self._draw = draw
        self._events: list[FleetEvent] = []
        self._added = 0
        self._end_s: dict[str, float] = {}
        """Available instance -> when its life ends."""
        self._additions_s: list[float] = []
        """Times of future additions, in order; the last one is after the end."""

    def run(self) -> FleetTrace:
        """Generate the events in order of time."""
        statistics = self._statistics
        additions_per_s = statistics.mean_instances / statistics.mean_life_s
        self._additions_s = [0.0] * round(statistics.mean_instances)
        while self._additions_s[-1] < statistics.duration_s:
            self._additions_s.append(self._additions_s[-1] + self._draw.expovariate(additions_per_s))
        size = self._burst_size()
        while True:
            removal_s = self._burst_at(size)
            addition_s = self._additions_s[0]
            at_s = min(removal_s, addition_s)
            if at_s >= statistics.duration_s:
                return FleetTrace(tuple(self._events), statistics.duration_s)
            if removal_s < addition_s:
                self._remove(size, removal_s)
                size = self._burst_size()
            else:
                self._add(self._additions_s.pop(0))

    def _burst_size(self) -> int:
        seen = self._statistics.removals_at_once
        return self._draw.choices(list(seen), list(seen.values()))[0]

    def _burst_at(self, size: int) -> float:
        """Return the middle of the times at which the next lives end, so that bursts keep the mean life."""
        ends_s = sorted(self._end_s.values())[:size]
        last_s = self._events[-1].at_s if self._events else 0.0
        return max(ends_s[(len(ends_s) - 1) // 2], last_s) if ends_s else math.inf

    def _add(self, at_s: float) -> None:
        if len(self._end_s) == self._statistics.max_instances:
            return
        self._added += 1
        instance = f"instance-{self._added}"
        self._end_s[instance] = at_s + self._life_s(is_running=at_s == 0)
        self._events.append(FleetEvent(at_s, "add", instance))

    def _life_s(self, *, is_running: bool) -> float:
        """Return a random life, or what is left of the life of an instance that runs when the trace begins."""
        location = math.log(self._statistics.median_life_s)
        variance = 2 * math.log(self._statistics.mean_life_s / self._statistics.median_life_s)
        if not is_running:
            return self._draw.lognormvariate(location, math.sqrt(variance))
        # At any moment, long lives are more frequent among the running ones: proportionally to their length.
        return self._draw.random() * self._draw.lognormvariate(location + variance, math.sqrt(variance))

    def _remove(self, size: int, at_s: float) -> None:
        for instance in sorted(self._end_s, key=self._end_s.__getitem__)[:size]:
            del self._end_s[instance]
            self._events.append(FleetEvent(at_s, "remove", instance))
