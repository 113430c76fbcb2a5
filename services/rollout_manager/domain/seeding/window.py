"""The seeding window (paper, section 4.1): how long the reserved engines generate at the start of each step.

A step's phases: `open` (all engines generate), `closing` (the reserved engines are commanded to suspend), `ended` (they
are suspended; the device is the trainer's). Without preemptible workers the window closes when all samples are
generated, which is a plain co-located trainer. When preemptible workers leave and the remaining ones are too slow, or
none remains, the window stays open or reopens. `tuner` decides the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlboost.services.rollout_manager.domain.seeding.tuner import StepMeter

Reason = Literal["window", "finished", "no_reserved"]


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The inputs of a decision."""

    now: float
    in_flight: int
    """Samples of the step in flight."""
    requested: int
    """Samples of the step in all."""
    reserved_awake: int
    """Reserved workers that are present and not suspended."""
    reserved: int
    preemptible_ready: int
    """Preemptible workers that can generate for the step now."""
    preemptible: int
    """Preemptible workers that are present, ready or about to be."""
    too_slow: bool = False
    """Preemptible workers left, and the remaining ones would keep the trainer waiting for long."""


@dataclass(slots=True)
class Window:
    """The window of one step. Times are on the manager's clock."""

    step: int
    length_s: float | None
    """None: until half of the step's samples are finished."""
    phase: Literal["open", "closing", "ended"] = "open"
    began_at: float | None = None
    """When the step's first sample was placed."""
    reason: Reason = "window"
    lasted_s: float = 0.0
    """How long it lasted until it closed for the first time."""
    reopened: bool = False
    fleet: int = 0
    """Preemptible workers that `length_s` is for."""
    max_fleet: int = 0
    """The largest number of preemptible workers during the step."""
    too_slow: bool = False
    """See `StepSnapshot`; as of the last check."""
    checked_at: float = 0.0
    meter: StepMeter | None = None
    """Measures the step; None after a restart in its middle."""

    def on_placed(self, now: float) -> None:
        """Record that a sample was placed: the window begins with the first one."""
        if self.began_at is None:
            self.began_at = now

    def length_so_far(self, now: float) -> float:
        """Return the seconds since the window began."""
        return 0.0 if self.began_at is None else now - self.began_at

    def uses_reserved(self, preemptible: int) -> bool:
        """Return True if the reserved engines should generate now."""
        return self.phase == "open" and (self.length_s != 0 or preemptible == 0)

    def advance(self, snapshot: StepSnapshot) -> Literal["close", "end", "reopen"] | None:
        """Enter the next phase if it is due, and return the transition."""
        match self.phase:
            case "open":
                reason = self._close_reason(snapshot)
                if reason is not None:
                    self.phase, self.reason = "closing", reason
                    if not self.reopened:
                        self.lasted_s = self.length_so_far(snapshot.now)
                    return "close"
            case "closing":
                if snapshot.reserved_awake == 0:
                    self.phase = "ended"
                    return "end"
            case "ended":
                if snapshot.in_flight and snapshot.reserved and (snapshot.preemptible == 0 or snapshot.too_slow):
                    self.phase, self.began_at, self.reopened = "open", snapshot.now, True
                    return "reopen"
        return None

    def _close_reason(self, snapshot: StepSnapshot) -> Reason | None:
        if snapshot.in_flight == 0:
            return "finished"
        if snapshot.reserved == 0 and snapshot.preemptible:
            return "no_reserved"
        return (
            "window" if snapshot.preemptible_ready and not snapshot.too_slow and self._time_is_over(snapshot) else None
        )

    def _time_is_over(self, snapshot: StepSnapshot) -> bool:
        if self.length_s is None:
            return snapshot.in_flight * 2 <= snapshot.requested
        return self.length_s == 0 or (self.began_at is not None and snapshot.now - self.began_at >= self.length_s)
