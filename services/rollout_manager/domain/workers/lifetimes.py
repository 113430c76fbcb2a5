"""How often workers of a kind are preempted, and how long a new one takes until it generates."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_STARTUP_WEIGHT = 0.2
"""Weight of the newest worker in the mean time of a startup."""


@dataclass(slots=True)
class Lifetimes:
    """Preemptions and startups of the workers of one kind, since this manager leads."""

    departed_s: float = 0.0
    """Sum of the lifetimes of the workers that are gone."""
    preemptions: int = 0
    startup_s: float = 0.0
    """Recent mean time from a worker's join until it serves its first weight version; 0 before the first."""

    def on_startup(self, startup_s: float) -> None:
        """Learn from a worker that is ready for the first time."""
        self.startup_s += (startup_s - self.startup_s) * (NEWEST_STARTUP_WEIGHT if self.startup_s else 1.0)

    def preemptions_per_s(self, present_s: float) -> float:
        """Return the hazard of one worker; `present_s` is the sum of the lifetimes of the workers that are present."""
        lived_s = self.departed_s + present_s
        return self.preemptions / lived_s if lived_s > 0 else 0.0


def availability(preemptions_per_s: float, startup_s: float) -> float:
    """Return the part of its time in which a worker generates if it is replaced after each preemption."""
    return 1.0 / (1.0 + preemptions_per_s * startup_s)
