"""How long to wait before a dead process is started again, and when to stop doing so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Exponential, forgotten after a long enough life.

    Args:
        first_s: the wait after the first death; it doubles with each further one.
        limit_s: the longest wait.
        steady_s: a process that lived so long had started well, and its death counts as a first one.
        most: so many deaths in a row are a crash loop: another start would end as they did.

    """

    first_s: float = 0.5
    limit_s: float = 10.0
    steady_s: float = 30.0
    most: int = 10
    deaths: int = 0

    @property
    def is_loop(self) -> bool:
        """Tell whether the deaths counted so far are a crash loop."""
        return self.deaths >= self.most

    def after(self, alive_s: float) -> float:
        """Return the seconds to wait after a life of `alive_s` seconds, and count the death."""
        if alive_s >= self.steady_s:
            self.deaths = 0
        wait_s = min(self.limit_s, self.first_s * 2.0 ** min(self.deaths, 30))
        self.deaths += 1
        return wait_s
