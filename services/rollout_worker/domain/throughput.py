"""Measures an engine: its throughput, and its decode steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from rlboost.services.rollout_worker.domain.requests import Emission

WINDOW_S = 1.0
MIN_MEASURED_S = 0.2
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

    The manager's model of a step's duration is linear in its batch, so it can be fitted to means over steps with
    different batches. An interval between two flushes counts if the engine generated throughout. The number of its
    steps is the most tokens that one sample got, or more if so few steps could not hold all tokens: then no sample
    lasted the whole interval.

    Args:
        slots: the largest batch.

    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._seconds = self._steps = self._tokens = 0.0
        self._since: float | None = None
        """The last flush with tokens; None if the engine was idle or paused after it."""
        self._version = -1

    def on_flush(self, emissions: Iterable[Emission], running: int, now: float) -> None:
        """Count the interval from the last flush with tokens to this one, if the engine generated throughout.

        Args:
            emissions: what all samples have emitted since the last flush.
            running: samples in the batch now; 0 while the engine is paused.
            now: the present time, in seconds of any clock.

        """
        tokens: Counter[int] = Counter()
        version = self._version
        for emission in emissions:
            tokens[emission.sample] += len(emission.tokens)
            version = max(version, emission.version)
        total = tokens.total()
        if total and running and self._since is not None and version == self._version:
            self.add(now - self._since, max(*tokens.values(), total / self._slots), total)
        if not running:
            self._since = None
        elif total:
            self._since = now
        self._version = version

    def add(self, seconds: float, steps: float, tokens: float) -> None:
        """Count time in which the engine generated throughout."""
        self._seconds, self._steps, self._tokens = self._seconds + seconds, self._steps + steps, self._tokens + tokens

    def take(self) -> tuple[float, float]:
        """Return mean batch and mean duration in seconds of the steps since the last result.

        Zeros, and no result, until they have taken `MIN_MEASURED_S` together.
        """
        if self._seconds <= MIN_MEASURED_S:
            return 0.0, 0.0
        means = min(self._slots, self._tokens / self._steps), self._seconds / self._steps
        self._seconds = self._steps = self._tokens = 0.0
        return means
