"""How long the reserved engines should generate at the start of a step, and how many workers are worth having.

The paper's algorithm 1: when the trainer waits for samples, the next window is longer; when the preemptible workers
wait for the next weights, it is shorter; what was learnt for a fleet size is remembered. Ours differs in this: of the
workers' wait, only what is above its usual least counts, since some is there however late the last sample comes (the
last micro-batch, the optimizer, the publishing), and to weigh that against a trainer without work makes windows too
short; seconds are not rounded; a difference that is small beside the step changes nothing (throughput is flat around
the best window, and following noise costs more than it gains); a fleet size never met is interpolated; the first window
of a job measures instead of guessing. With staleness the workers wait only when they are as far ahead as they may be:
there the same two waits hold the samples made ahead between empty and full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

ETA = 2.0
"""What the difference of the waits is divided by; the paper's released code has 3."""
FLOOR_RISES = 0.2
"""How far one step moves the workers' least wait upwards; downwards it follows at once."""
UNSTEADY = 1.5
"""What that is divided by once more when workers came or went: the waits tell of that, too."""
DEAD_BAND = 0.05
"""Differences below this part of the step are noise."""
Source = Literal["fixed", "off", "first", "memory", "between", "carried"]


@dataclass(slots=True)
class Offload:
    """What a job has learnt; kept with the job. Times are seconds."""

    window_s: float | None = None
    """The window as last adapted; None before the first step was measured."""
    memory: dict[int, float] = field(default_factory=dict)
    """Number of preemptible workers -> window (M in the paper)."""
    least_wait_s: float = 0.0
    """What the workers wait even when the trainer waits for them: the part that no window changes."""
    train_s: float = 0.0
    """How long the last step was trained."""
    wanted: float | None = None
    """How many preemptible workers would balance generation and training (N_prem in the paper)."""

    def choose(self, fleet: int) -> tuple[float | None, Source]:
        """Return the window for a step that begins with this many preemptible workers, and where it comes from.

        None: nothing is known, so the window lasts until half of the step's samples are finished.
        """
        if fleet in self.memory:
            return self.memory[fleet], "memory"
        if self.window_s is None:
            return None, "first"
        smaller, larger = [n for n in self.memory if n < fleet], [n for n in self.memory if n > fleet]
        if not smaller or not larger:
            return self.window_s, "carried"
        low, high = max(smaller), min(larger)
        part = (fleet - low) / (high - low)
        return self.memory[low] + part * (self.memory[high] - self.memory[low]), "between"

    def learn(self, seen: Seen) -> dict[str, Any]:
        """Take in a step that is over; return the inputs and what came of them, for people."""
        noise_s = DEAD_BAND * seen.step_s
        if seen.train_wait_s > noise_s:
            risen_s = self.least_wait_s + FLOOR_RISES * (seen.remote_wait_s - self.least_wait_s)
            self.least_wait_s = min(seen.remote_wait_s, risen_s) if self.least_wait_s else seen.remote_wait_s
        difference = seen.train_wait_s - max(0.0, seen.remote_wait_s - self.least_wait_s)
        change_s = difference / ETA if abs(difference) > noise_s else 0.0
        if not seen.steady:
            change_s /= UNSTEADY
        # One step may mislead: it halves or doubles the window at most, or adds a quarter of the step.
        change_s = min(max(change_s, -seen.window_s / 2), max(seen.window_s, 0.25 * seen.step_s))
        self.window_s = max(0.0, seen.window_s + change_s)
        if seen.steady:
            self.memory[seen.fleet] = self.window_s
        self.train_s = seen.train_s
        if seen.train_s > 0:
            work_s = seen.remote_s * seen.fleet_mean + seen.window_s * seen.reserved
            self.wanted = work_s / seen.train_s
        return {
            "train_wait_s": round(seen.train_wait_s, 3),
            "remote_wait_s": round(seen.remote_wait_s, 3),
            "least_wait_s": round(self.least_wait_s, 3),
            "step_s": round(seen.step_s, 3),
            "fleet_mean": round(seen.fleet_mean, 2),
            "window_was_s": round(seen.window_s, 3),
            "change_s": round(change_s, 3),
            "window_s": round(self.window_s, 3),
            "remembered_for": seen.fleet if seen.steady else None,
            "wanted": None if self.wanted is None else math.ceil(self.wanted),
        }


def wanted(offloads: Iterable[Offload]) -> int | None:
    """Return how many preemptible workers all jobs together are worth having; None while no job knows."""
    known = [offload.wanted for offload in offloads if offload.wanted is not None]
    return math.ceil(sum(known)) if known else None


@dataclass(frozen=True, slots=True)
class Seen:
    """One step, measured. Times are seconds."""

    window_s: float
    """How long the window was."""
    train_wait_s: float
    """The trainer had the device and waited for samples."""
    remote_wait_s: float
    """The preemptible workers had nothing to do."""
    train_s: float
    step_s: float
    remote_s: float
    """The preemptible workers generated."""
    fleet: int
    """Preemptible workers at the end."""
    fleet_mean: float
    steady: bool
    """Nobody came or went."""
    reserved: int


@dataclass(slots=True)
class Meter:
    """Measures one step as it goes; times on the manager's clock."""

    began_at: float
    at: float
    busy_s: float = 0.0
    """Somebody preemptible was there and there was something to generate."""
    idle_s: float = 0.0
    """Somebody preemptible was there and there was nothing to generate."""
    workers_s: float = 0.0
    least: int | None = None
    most: int = 0
    fleet: int = 0
    reserved: int = 0

    def update(self, now: float, *, fleet: int, reserved: int, working: bool) -> None:
        """Count the time since the last update as spent in this state."""
        passed = now - self.at
        self.at, self.fleet, self.reserved = now, fleet, reserved
        self.workers_s += fleet * passed
        self.least = fleet if self.least is None else min(self.least, fleet)
        self.most = max(self.most, fleet)
        if fleet and working:
            self.busy_s += passed
        elif fleet:
            self.idle_s += passed

    def seen(self, window_s: float, train_wait_s: float, train_s: float) -> Seen:
        """Return the step that ends now."""
        step_s = self.at - self.began_at
        return Seen(
            window_s=window_s,
            train_wait_s=train_wait_s,
            remote_wait_s=self.idle_s,
            train_s=train_s,
            step_s=step_s,
            remote_s=self.busy_s,
            fleet=self.fleet,
            fleet_mean=self.workers_s / step_s if step_s > 0 else float(self.fleet),
            steady=self.least == self.most,
            reserved=self.reserved,
        )
