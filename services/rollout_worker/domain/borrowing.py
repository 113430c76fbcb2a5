"""Decides when a worker beside a serving engine generates, and when it yields the device to serving.

The idea is that of ROSE: rollouts take what serving leaves, and serving comes first. The serving engine shows pressure
by requests that wait, by more running requests than the worker may share the device with, or by a late first token.
Pressure counts at once. The device is taken back after a calm time, which doubles with each spell that was too short to
pay for its pause: a server whose bursts come often is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MIN_CALM_S = 0.5
"""Calm time before the device is taken back, after a spell that was worthwhile."""
MAX_CALM_S = 16.0
WORTHWHILE_S = 2.0
"""A shorter spell costs about as much as it gives: its samples are prefilled again on other workers."""
WINDOW_S = 5.0
"""First tokens of this time are compared with the limit."""
LATE_SHARE = 0.05
"""The limit holds for the 95th percentile."""


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """What a serving engine reports of itself; sums over its replicas."""

    running: float
    """Requests in its batch."""
    waiting: float
    """Requests that wait for a place in it."""
    first_tokens: Mapping[float, float] = field(default_factory=dict)
    """Histogram of the time to the first token since its start: upper bound in s -> requests up to it."""

    @property
    def n_first_tokens(self) -> float:
        """Return how many requests have had their first token since the engine's start."""
        return max(self.first_tokens.values(), default=0.0)

    def n_within(self, limit_s: float) -> float:
        """Return how many had it within the largest bound of the histogram up to this limit."""
        return max((n for bound, n in self.first_tokens.items() if bound <= limit_s), default=0.0)


class Borrowing:
    """Whether the worker yields, over time. It begins yielding.

    Args:
        max_running: requests that may run in the serving engine while the worker generates.
        ttft_limit_s: limit of the serving engine's time to the first token, see `LATE_SHARE`; 0: none.

    """

    def __init__(self, max_running: int = 0, ttft_limit_s: float = 0.0) -> None:
        self._max_running = max_running
        self._ttft_limit_s = ttft_limit_s
        self.reason = "the load of the serving engine is not known yet"
        """Why the worker yields; empty while it generates."""
        self.calm_s = MIN_CALM_S
        """Time without pressure after which it takes the device back."""
        self.late_alone = ""
        """Not empty while first tokens were late in a whole window in which the worker yielded: it is not to blame."""
        self._changed_at = 0.0
        """Since when it yields, or generates."""
        self._calm_since: float | None = None
        self._window: deque[tuple[float, ServingLoad]] = deque()

    def observe(self, load: ServingLoad | None, now_s: float) -> str:
        """Take the newest load, None if the serving engine did not answer in time; return `reason`."""
        self.late_alone = ""
        if pressure := self._pressure(load, now_s):
            if not self.reason:
                if load is not None:  # else it is no burst, and perhaps this worker had no time to read the answer
                    was_worthwhile = now_s - self._changed_at >= WORTHWHILE_S
                    self.calm_s = MIN_CALM_S if was_worthwhile else min(2 * self.calm_s, MAX_CALM_S)
                self._changed_at = now_s
            self.reason, self._calm_since = pressure, None
        elif self.reason:
            self._calm_since = now_s if self._calm_since is None else self._calm_since
            if now_s - self._calm_since >= self.calm_s:
                self.reason, self._changed_at = "", now_s
        return self.reason

    def _pressure(self, load: ServingLoad | None, now_s: float) -> str:
        if load is None:
            self._window.clear()
            return "it does not answer in time"
        before = self._window[-1][1] if self._window else load
        if load.n_first_tokens < before.n_first_tokens:  # it was restarted
            self._window.clear()
            before = load
        self._window.append((now_s, load))
        while now_s - self._window[0][0] > WINDOW_S:
            self._window.popleft()
        if load.waiting:
            return f"{load.waiting:g} of its requests wait"
        # One that ran between two looks counts as running.
        running = load.running or float(load.n_first_tokens > before.n_first_tokens)
        if running > self._max_running:
            return f"{running:g} requests run"
        return self._lateness(load) if self._ttft_limit_s else ""

    def _lateness(self, load: ServingLoad) -> str:
        since_s, first = self._window[0]
        n = load.n_first_tokens - first.n_first_tokens
        n_late = n - (load.n_within(self._ttft_limit_s) - first.n_within(self._ttft_limit_s))
        if n_late <= LATE_SHARE * n:
            return ""
        late = f"{n_late:g} of its last {n:g} first tokens took more than {1e3 * self._ttft_limit_s:g} ms"
        if self.reason and since_s >= self._changed_at + WINDOW_S and n * LATE_SHARE >= 1:
            self.late_alone = late
        return late


class Seats:
    """How many samples run in an engine that also serves requests, over time. It begins with one, and keeps one.

    Late first tokens of requests halve the number at once. Without any it grows after a calm time: it doubles while no
    request comes, and grows by one while some do. The calm time doubles with each growth that did not last.

    Args:
        most: the worker's slots.
        ttft_limit_s: limit of the time to the first token, see `LATE_SHARE`.

    """

    def __init__(self, most: int, ttft_limit_s: float) -> None:
        self._most = most
        self._ttft_limit_s = ttft_limit_s
        self.count = 1
        self.calm_s = MIN_CALM_S
        """Time without a late token after which it grows."""
        self._changed_at = 0.0
        self._grew_at: float | None = None
        """When it last grew; None once it was halved since."""
        self._window: deque[tuple[float, float]] = deque()
        """(time, time to the first token) of requests since the last change, in `WINDOW_S`."""

    def observe(self, first_tokens_s: Iterable[float], longest_wait_s: float, now_s: float) -> int:
        """Return the number.

        Args:
            first_tokens_s: times to the first token of the requests that had theirs since the last call.
            longest_wait_s: of the requests that wait for theirs; 0 without any.
            now_s: time of any clock.

        """
        self._window.extend((now_s, took_s) for took_s in first_tokens_s)
        while self._window and now_s - self._window[0][0] > WINDOW_S:
            self._window.popleft()
        n_late = sum(took_s > self._ttft_limit_s for _, took_s in self._window)
        since_s = now_s - self._changed_at
        if longest_wait_s > self._ttft_limit_s or n_late > LATE_SHARE * len(self._window):
            if self.count > 1 and since_s >= self._ttft_limit_s:
                if self._grew_at is not None:
                    lasted = now_s - self._grew_at >= WORTHWHILE_S
                    self.calm_s = MIN_CALM_S if lasted else min(2 * self.calm_s, MAX_CALM_S)
                    self._grew_at = None
                self._change(self.count // 2, now_s)
            elif self.count == 1:
                self._changed_at = now_s
        elif self.count < self._most and since_s >= self.calm_s:
            self._grew_at = now_s
            self._change(self.count + 1 if self._window else min(2 * self.count, self._most), now_s)
        return self.count

    def _change(self, count: int, now_s: float) -> None:
        self.count, self._changed_at = count, now_s
        self._window.clear()
