"""The seeding window (paper, section 4.1): how long the reserved engines generate at the start of each step.

A step's phases: `open` (everybody generates), `closing` (the reserved engines were told to suspend), `ended` (they are
suspended; the device is the trainer's). With no preemptible worker the window is endless: it closes when everything is
generated, which is a plain co-located trainer. When preemptible workers go away, and those that are left would keep the
trainer waiting for long, or none is left, the window stays open or opens again. How long it is, `offload` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.rollout_manager.domain.offload import Meter

Reason = Literal["window", "finished", "no_reserved"]


@dataclass(frozen=True, slots=True)
class View:
    """What a decision looks at."""

    now: float
    live: int
    """Samples of the step still in flight."""
    asked: int
    """Samples of the step in all."""
    reserved_awake: int
    """Reserved workers that are there and not suspended."""
    reserved: int
    preemptible_ready: int
    """Preemptible workers that can generate for the step now."""
    preemptible: int
    """Preemptible workers that are there, ready or about to be."""
    left_behind: bool = False
    """The preemptible workers that are left would keep the trainer waiting for long."""


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
    """How long it was, once it has ended: the first time, should it open again."""
    reopened: bool = False
    crew: int = 0
    """The most preemptible workers that the step has had."""
    left_behind: bool = False
    """Whether those that are left would keep the trainer waiting for long, when that was last looked at."""
    looked_at: float = 0.0
    meter: Meter | None = None
    """Measures the step; None after a restart in its middle."""

    def placed(self, now: float) -> None:
        """Note that a sample was placed: the window begins with the first."""
        if self.began_at is None:
            self.began_at = now

    def length_so_far(self, now: float) -> float:
        """Return the seconds since the window began."""
        return 0.0 if self.began_at is None else now - self.began_at

    def seeds(self, preemptible: int) -> bool:
        """Tell whether the reserved engines should generate now."""
        return self.phase == "open" and (self.length_s != 0 or preemptible == 0)

    def advance(self, view: View) -> Literal["close", "end", "reopen"] | None:
        """Decide what happens now, if anything, and enter the phase."""
        match self.phase:
            case "open":
                reason = self._why_close(view)
                if reason is not None:
                    self.phase, self.reason = "closing", reason
                    if not self.reopened:
                        self.lasted_s = self.length_so_far(view.now)
                    return "close"
            case "closing":
                if view.reserved_awake == 0:
                    self.phase = "ended"
                    return "end"
            case "ended":
                if view.live and view.reserved and (view.preemptible == 0 or view.left_behind):
                    self.phase, self.began_at, self.reopened = "open", view.now, True
                    return "reopen"
        return None

    def _why_close(self, view: View) -> Reason | None:
        if view.live == 0:
            return "finished"
        if view.reserved == 0 and view.preemptible:
            return "no_reserved"
        return "window" if view.preemptible_ready and not view.left_behind and self._over(view) else None

    def _over(self, view: View) -> bool:
        if self.length_s is None:
            return view.live * 2 <= view.asked
        return self.length_s == 0 or (self.began_at is not None and view.now - self.began_at >= self.length_s)
