"""Generates spot traces that resemble a recorded one."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlboost.simulation.traces.fleet_trace import FleetEvent, FleetTrace


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
