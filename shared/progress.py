"""Progress of long work as text: the amount done, the rate, and the time left or the last duration."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_RATE_AFTER_S = 1.0
"""A rate over less time says little."""
_RATE_OVER_S = 60.0
_SHOWN_AFTER_S = 1.0
"""A shorter duration is not shown."""


class TransferProgress:
    """Bytes done, of a total that may be unknown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing to do; the clock is in seconds."""
        self._clock = clock
        self._began_at = clock()
        self.total_bytes = 0
        """0: unknown."""
        self.done_bytes = 0

    def text(self) -> str:
        """Return `1.2 GB of 3.4 GB, 210 MB/s, 11 s left`; empty before there is anything to say."""
        elapsed_s = self._clock() - self._began_at
        done, total = self.done_bytes, max(self.total_bytes, self.done_bytes)
        if not total:
            return ""
        parts = [f"{_size(done)} of {_size(total)}" if self.total_bytes else _size(done)]
        if done and elapsed_s >= _RATE_AFTER_S:
            rate = done / elapsed_s
            parts.append(f"{_size(rate)}/s")
            if self.total_bytes:
                parts.append(f"{_time((total - done) / rate)} left")
        return ", ".join(parts)


class CountProgress:
    """Items done of a known total, and their rate over the last minute.

    What is done within a second of the first update counts as done before: work that is resumed has its old results at
    once, and the rate is that of new ones.
    """

    def __init__(self, items: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing to do; `items` is their name in the plural, the clock is in seconds."""
        self._items = items
        self._clock = clock
        self._total = 0
        self._began_at = 0.0
        self._seen: deque[tuple[float, int]] = deque()
        """(time, items done): the last update, and earlier ones at least a second apart."""

    def update(self, done: int, total: int) -> None:
        """Record how many items are done; fewer than before means that the work has begun again."""
        now, self._total = self._clock(), total
        if not self._seen or done < self._seen[-1][1]:
            self._began_at = now
        if now - self._began_at < _RATE_AFTER_S:
            self._seen.clear()
        elif len(self._seen) > 1 and self._seen[-1][0] - self._seen[-2][0] < _RATE_AFTER_S:
            self._seen.pop()
        self._seen.append((now, done))
        while len(self._seen) > 1 and now - self._seen[1][0] >= _RATE_OVER_S:
            self._seen.popleft()

    def text(self) -> str:
        """Return `300 of 1,200 samples, 24/s, 38 s left`; empty before the first update."""
        if not self._seen:
            return ""
        count = f"{self._seen[-1][1]:,} of {self._total:,} {self._items}"
        return ", ".join(part for part in (count, self.rate_text()) if part)

    def rate_text(self) -> str:
        """Return `24/s, 38 s left`; empty while no rate is known, or when all is done."""
        if not self._seen:
            return ""
        (since, before), (_, done) = self._seen[0], self._seen[-1]
        elapsed_s, left = self._clock() - since, self._total - done
        if done == before or elapsed_s < _RATE_AFTER_S or left <= 0:
            return ""
        rate = (done - before) / elapsed_s
        return f"{_rate(rate)}, {_time(left / rate)} left"


class LastDuration:
    """Duration of the last run of work whose progress is unknown."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a duration; the clock is in seconds."""
        self._clock = clock
        self._last_s: float | None = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the body, unless it raises."""
        began = self._clock()
        yield
        self._last_s = self._clock() - began

    def text(self) -> str:
        """Return `the last time took 12 s`; empty if it took no second, or there was none."""
        if self._last_s is None or self._last_s < _SHOWN_AFTER_S:
            return ""
        return f"the last time took {_time(self._last_s)}"


def _size(n_bytes: float) -> str:
    for unit, name in _UNITS:
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3g} {name}"
    return f"{n_bytes:.0f} B"


def _rate(per_s: float) -> str:
    if per_s < 0.1:
        return f"{per_s * 60:.2g}/min"
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.2g}/s"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
