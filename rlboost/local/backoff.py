"""Restart policy: how long to wait before restarting a dead process, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Exponential back-off that resets after a process has lived long enough.

    Args:
        first_s: wait after the first death; doubles with each further death.
        limit_s: longest wait.
        steady_s: a process that lived this long started well, and its death counts as the first.
        most: number of consecutive deaths that is a crash loop.

    """

    first_s: float = 0.5
    limit_s: float = 10.0
    steady_s: float = 30.0
    most: int = 10
    deaths: int = 0

    @property
    def is_loop(self) -> bool:
        """Return True if the deaths counted so far are a crash loop."""
        return self.deaths >= self.most

    def after(self, alive_s: float) -> float:
        """Count a death after `alive_s` seconds of life; return the seconds to wait."""
        if alive_s >= self.steady_s:
            self.deaths = 0
        wait_s = min(self.limit_s, self.first_s * 2.0 ** min(self.deaths, 30))
        self.deaths += 1
        return wait_s
