"""What holds up a process's event loop: how long it ran nothing else, and coroutines that let others run in between."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlboost.shared.process.lifecycle import until_stop

TICK_S = 0.01
WINDOW_S = 60.0
LONG_S = 0.01
"""A `Turnstile` lets fewer coroutines continue at once where an iteration of the loop takes longer than this."""
MAX_AT_ONCE = 4
_PASSES = 3
"""Iterations of the loop until a task runs whose timer was due: one for the timer, its future, and the task."""


class Stalls(Collector):
    """Measures for how long the event loop ran nothing else, as a metric of the last minute."""

    def __init__(self) -> None:
        """Measure nothing before `run`."""
        self._seen: deque[tuple[float, float]] = deque()
        """(When, how long), of those in the window; each longer than all later ones."""

    async def run(self, stop: asyncio.Event) -> None:
        """Measure until the stop."""
        at = time.monotonic()
        while not stop.is_set():
            await until_stop(stop, TICK_S)
            now = time.monotonic()
            self.add(now, max(0.0, now - at - TICK_S))
            at = now

    def add(self, now: float, stall_s: float) -> None:
        """Add a stall that has just ended."""
        while self._seen and self._seen[-1][1] <= stall_s:
            self._seen.pop()
        self._seen.append((now, stall_s))
        while self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()

    @property
    def longest_s(self) -> float:
        """Return the longest stall in the window."""
        return self._seen[0][1] if self._seen else 0.0

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        yield GaugeMetricFamily(
            "rlboost_event_loop_stall_seconds",
            "Longest time in the last minute for which the event loop ran nothing else",
            self.longest_s,
        )


async def let_others_run() -> None:
    """Let every task run that is ready or due: after one `asyncio.sleep(0)`, the caller would run before them."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)


class Turnstile:
    """Lets few coroutines continue in each iteration of the event loop, in the order of their arrival.

    Hundreds that become ready together, such as clients that all get new tokens, would hold up all else until the last
    of them waits again. How many pass follows how long the iterations take.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._at_once = 4
        self._n_passed = 0
        self._began_at: float | None = None
        """When `_next` was called, None while nothing passes."""

    async def enter(self) -> None:
        """Return at once, or in a later iteration of the loop if enough others have passed in this one."""
        if self._began_at is None:
            self._n_passed = 0
            self._schedule()
        if not self._waiting and self._n_passed < self._at_once:
            self._n_passed += 1
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _schedule(self) -> None:
        self._began_at = time.perf_counter()
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        assert self._began_at is not None, "it is scheduled"
        took_s = time.perf_counter() - self._began_at
        if took_s > LONG_S:
            self._at_once = max(1, self._at_once // 2)
        elif self._n_passed >= self._at_once:
            self._at_once = min(MAX_AT_ONCE, self._at_once + 1)
        self._n_passed = 0
        while self._waiting and self._n_passed < self._at_once:
            future = self._waiting.popleft()
            if not future.done():  # its coroutine was cancelled
                future.set_result(None)
                self._n_passed += 1
        if self._n_passed:
            self._schedule()
        else:
            self._began_at = None
