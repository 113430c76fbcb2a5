"""What the time from a worker's start to its first token in the log went into: one line of the log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog

log = structlog.get_logger(__name__)

Lap = Literal["import", "join", "version", "pull", "load", "canary", "assignment", "step"]
"""In order: until our code runs; until the manager has heard of the worker; until it is told which weights to serve;
until they are here; until the engine has them, verified; until it agrees with the trainer; until it has a sample; until
the log has the first token."""


class Startup:
    """A stopwatch that takes each lap once; what happens again before the first token is part of the next lap.

    Args:
        age_s: for how long the process has been there.
        clock: seconds.

    """

    def __init__(self, age_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock() - age_s
        self._laps: dict[str, float] = {}

    def end(self, lap: Lap) -> None:
        """Note the end of a lap."""
        if lap not in self._laps:
            now = self._clock()
            self._laps[lap], self._last = now - self._last, now

    def flushed(self, tokens_made: int) -> None:
        """Note that the log has all of so many tokens; the first one ends the last lap."""
        if tokens_made and "step" not in self._laps:
            self.end("step")
            laps = {f"{lap}_s": round(seconds, 3) for lap, seconds in self._laps.items()}
            log.info("first_token", after_s=round(self._last - self._began, 3), **laps)


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Return for how long this process has been there; 0 where `/proc` does not tell."""
    try:
        # proc(5), counted after the name: the start, in ticks since boot, is field 22.
        ticks = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
