"""Named waits: each has a subject, a reason, a start and a limit, and is listed while it lasts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from prometheus_client import Counter

from rlboost.shared.errors import WaitTimedOut
from rlboost.shared.messages import Wait, WaitKind

log = structlog.get_logger(__name__)

_MAX_TIMED_OUT = 16
"""Most waits that are retained for `Waits.take_timed_out`."""
_TIMEOUTS = Counter("rlboost_wait_timeouts", "Waits that reached their limit")


class Waits:
    """The current waits of one process."""

    def __init__(self) -> None:
        self._active: dict[int, tuple[Wait, Callable[[], str]]] = {}
        self._numbers = itertools.count()
        self._timed_out: deque[Wait] = deque(maxlen=_MAX_TIMED_OUT)

    @asynccontextmanager
    async def on(
        self,
        subject: str,
        *,
        because: str,
        limit_s: float,
        progress: Callable[[], str] = str,
        kind: WaitKind = "",
    ) -> AsyncIterator[None]:
        """List a wait while the body runs, for at most `limit_s` seconds.

        Args:
            subject: what is waited for.
            because: the reason.
            limit_s: maximum duration.
            progress: returns how far it is, which is added to the reason whenever the wait is listed; "" adds nothing.
            kind: what programs recognize the wait by.

        Raises:
            WaitTimedOut: the body took longer.

        """
        number = next(self._numbers)
        wait = Wait(subject=subject, because=because, since=time.time(), limit_s=limit_s, kind=kind)
        self._active[number] = (wait, progress)
        try:
            async with asyncio.timeout(limit_s) as timer:
                yield
        except TimeoutError as error:
            if timer.expired():
                count_timeout(subject, because, limit_s)
                self._timed_out.append(wait)
                raise WaitTimedOut(f"waited {limit_s:.0f} s for {subject} ({because})") from error
            raise
        finally:
            del self._active[number]

    def current(self) -> list[Wait]:
        """Return the current waits, oldest first."""
        waits = sorted(self._active.values(), key=lambda active: active[0].since)
        return [_with_progress(wait, progress()) for wait, progress in waits]

    def take_timed_out(self) -> list[Wait]:
        """Return the waits that have reached their limit since the last call, oldest first."""
        waits = list(self._timed_out)
        self._timed_out.clear()
        return waits


def count_timeout(subject: str, because: str, limit_s: float, **ids: str) -> None:
    """Log and count a wait that has reached its limit; `ids` are added to the log line."""
    _TIMEOUTS.inc()
    log.warning("wait_timed_out", subject=subject, because=because, limit_s=limit_s, **ids)


def _with_progress(wait: Wait, text: str) -> Wait:
    return wait.model_copy(update={"because": f"{wait.because}: {text}"}) if text else wait
