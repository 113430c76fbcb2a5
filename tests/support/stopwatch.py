"""Seconds that a promise is about, on a machine that may be busy with other things."""

from __future__ import annotations

import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")


class Stopwatch:
    """Counts from its making, leaving out the time in which something on this machine waited for a processor.

    On a quiet machine that is nearly all of the time; on one that is busy throughout, what a process does late is not
    told from what it had no processor for, and nothing is counted.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self._began, self._stalled = time.monotonic(), _stalled_s()

    def read(self) -> float:
        """Return the seconds until now; where Linux does not tell what waited (no PSI), all of them."""
        # What waited is asked first: it must never be more than what passed.
        stalled = _stalled_s() - self._stalled
        return max(0.0, time.monotonic() - self._began - stalled)


def _stalled_s() -> float:
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except OSError:  # the file may be there and yet refuse to be read
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6
