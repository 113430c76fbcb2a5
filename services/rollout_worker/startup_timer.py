"""Logs how long each phase from a worker's start to its first token took, as one line: `first_token`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog

log = structlog.get_logger(__name__)

Phase = Literal["import", "join", "version", "pull", "load", "parity", "assignment", "step"]
"""In order, each until: our code runs; the manager knows the worker; a version is assigned; its weights are pulled;
the engine has loaded and verified them; the parity check has passed; a sample is assigned; the log has its first
token."""


class StartupTimer:
    """Times each phase once; what happens again before the first token counts toward the phase under way.

    Args:
        age_s: age of the process.
        clock: seconds.

    """

    def __init__(self, age_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock() - age_s
        self._phases: dict[str, float] = {}

    def end(self, phase: Phase) -> None:
        """Record the end of a phase; only the first call per phase counts."""
        if phase not in self._phases:
            now = self._clock()
            self._phases[phase], self._last = now - self._last, now

    def on_flush(self, tokens_generated: int) -> None:
        """Record that the log has the first `tokens_generated` tokens; the first token ends the last phase."""
        if tokens_generated and "step" not in self._phases:
            self.end("step")
            phases = {f"{phase}_s": round(seconds, 3) for phase, seconds in self._phases.items()}
            log.info("first_token", after_s=round(self._last - self._began, 3), **phases)


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Return the age of this process; 0 if `/proc` does not tell."""
    try:
        # proc(5), counted after the name: the start, in ticks since boot, is field 22.
        ticks = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
