"""The load of one worker: what it measures about its engine, for heartbeats and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.services.rollout_worker.domain.throughput import DecodeMeter, Throughput


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's current load."""

    running: int
    """Requests in each decode step."""
    pending: int
    """Requests waiting for a slot or for KV-cache capacity."""
    tokens_generated_total: int
    """Completion tokens generated since the engine was built, including those of aborted requests."""
    version: int
    """The loaded weight version; -1 before the first load and after a failed one."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use; 0 = unknown."""

    resident_bytes: int = 0
    """Memory of this process."""
    device_used_bytes: int = 0
    """Memory of the engine's device that all processes use."""
    device_total_bytes: int = 0
    """All memory of the engine's device."""


@dataclass(frozen=True, slots=True)
class Load:
    """The measurements of one moment."""

    tokens_per_s: float = 0.0
    memory: Memory = field(default_factory=Memory)
    batch: float = 0.0
    """Mean batch of the decode steps since an earlier measurement; see `DecodeMeter.take`."""
    step_s: float = 0.0
    """Mean duration of these steps."""
    update_s: float = 0.0
    """Duration of the last weight update; 0 before the first."""
    update_pause_s: float = 0.0
    """Part of `update_s` without generation."""


@dataclass(slots=True)
class FlushTimes:
    """Total duration of flushes, from the engine to Redis's answer."""

    count: int = 0
    sum_s: float = 0.0


class LoadMeters:
    """Measures a worker's load.

    Args:
        slots: the engine's largest batch.

    """

    def __init__(self, slots: int) -> None:
        self._throughput = Throughput()
        self._decode = DecodeMeter(slots)
        self._update_s = self._update_pause_s = 0.0
        self.flush_times = FlushTimes()
        self.last = Load()
        """The newest result of `measure`."""

    def on_emissions(self, emissions: Sequence[Emission], running: int, now: float) -> None:
        """Record what the engine has generated; see `DecodeMeter.on_flush`."""
        self._decode.on_flush(emissions, running, now)

    def on_flushed(self, duration_s: float) -> None:
        """Record a flush that has sent tokens."""
        self.flush_times.count += 1
        self.flush_times.sum_s += duration_s

    def on_weights_replaced(self, update_s: float, pause_s: float) -> None:
        """Record a weight update: its duration, and the part without generation."""
        self._update_s, self._update_pause_s = update_s, pause_s

    def measure(self, tokens_generated_total: int, memory: Memory, now: float) -> Load:
        """Return the load at `now` (seconds of any clock), since the last call for what is a mean."""
        batch, step_s = self._decode.take()
        speed = self._throughput.update(tokens_generated_total, now)
        self.last = Load(speed, memory, batch, step_s, self._update_s, self._update_pause_s)
        return self.last
