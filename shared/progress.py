"""How far a transfer of bytes is, as a text with rate and remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_RATE_AFTER_S = 1.0
"""Before, a rate says little."""


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
                parts.append(f"{(total - done) / rate:.0f} s left")
        return ", ".join(parts)


def _size(n_bytes: float) -> str:
    for unit, name in _UNITS:
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3g} {name}"
    return f"{n_bytes:.0f} B"
