"""Measures an engine: its throughput, and its decode steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from rlboost.services.rollout_worker.domain.requests import Emission

WINDOW_S = 1.0
LEAST_S = 0.2
"""Fewer seconds are too imprecise: each flush may come in the middle of a step."""


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


class DecodeMeter:
    """Mean batch and mean duration of decode steps.

    A step of n samples takes about a + b n seconds. The same then holds for the means over any steps, however the batch
    changed meanwhile. Only time between two flushes counts in which the engine generated without a pause: the sample
    with the most tokens got one in each step.
    """

    def __init__(self) -> None:
        self._seconds = self._steps = self._tokens = 0.0
        self._since: float | None = None
        """The last flush with tokens; None if the engine was idle after it."""
        self._version = -1

    def on_flush(self, emissions: Iterable[Emission], running: int, now: float) -> None:
        """Take what the engine has generated since the last flush.

        Args:
            emissions: of all samples.
            running: samples in the batch now.
            now: seconds of any clock.

        """
        tokens: Counter[int] = Counter()
        version = self._version
        for emission in emissions:
            tokens[emission.sample] += len(emission.tokens)
            version = max(version, emission.version)
        total = tokens.total()
        if total and running and self._since is not None and version == self._version:
            self.add(now - self._since, max(tokens.values()), total)
        if not running:
            self._since = None
        elif total:
            self._since = now
        self._version = version

    def add(self, seconds: float, steps: float, tokens: float) -> None:
        """Count time in which the engine generated without a pause."""
        self._seconds, self._steps, self._tokens = self._seconds + seconds, self._steps + steps, self._tokens + tokens

    def take(self) -> tuple[float, float]:
        """Return mean batch and duration of the steps since the last call; zeros while they took `LEAST_S` at most."""
        if self._seconds <= LEAST_S:
            return 0.0, 0.0
        means = self._tokens / self._steps, self._seconds / self._steps
        self._seconds = self._steps = self._tokens = 0.0
        return means
