"""Computes a speed from a growing counter."""

from __future__ import annotations

from collections import deque

WINDOW_S = 1.0


class Throughput:
    """Tokens per second over the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, total: int, now: float) -> float:
        """Record the counter's value at `now` (seconds of any clock); return the speed, 0 after a counter reset."""
        if self._seen and total < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (total - before) / (now - since) if now > since else 0.0
