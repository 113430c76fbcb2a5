"""Waits with a name and a limit, retries, and bounded concurrency."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

import stamina
import structlog
from prometheus_client import Counter

from rlboost.shared.errors import WaitTimedOut
from rlboost.shared.messages import Wait, WaitKind
from rlboost.shared.messages.codec import MAX_SECONDS

log = structlog.get_logger(__name__)

# --- Retries of calls to something that is unavailable for a while ----------------------------------------------------
# `logs.configure` logs the first try that failed, and every tenth.


T = TypeVar("T")


class _LastError:
    """Why the last try of a call failed that a wait contains; empty after one that succeeded."""

    text = ""


_last_error: ContextVar[_LastError | None] = ContextVar("last_error", default=None)
"""That of the innermost wait; tasks that are created within the wait have it too."""


async def retry_while(
    unavailable: type[Exception] | Callable[[Exception], bool],
    call: Callable[[], Awaitable[T]],
    *,
    limit_s: float | None = None,
    first_s: float = 0.1,
    longest_s: float = 2.0,
    jitter_s: float = 1.0,
) -> T:
    """Return the result of an idempotent call, which is repeated while it fails with such an error.

    The wait that contains it shows the error.

    Args:
        unavailable: the errors after which the call is repeated; any other is raised.
        call: makes the call.
        limit_s: how long it is repeated before the last error is raised; None if the caller limits the time.
        first_s: pause before the second try; each pause is twice the one before.
        longest_s: the longest pause.
        jitter_s: up to this much is added to a pause at random, up to `longest_s`.

    """
    last_error = _last_error.get() or _LastError()

    def is_retried(error: Exception) -> bool:
        found = isinstance(error, unavailable) if isinstance(unavailable, type) else unavailable(error)
        if found:
            last_error.text = str(error) or repr(error)
        return found

    retries = stamina.retry_context(
        on=is_retried,
        attempts=None,
        timeout=limit_s,
        wait_initial=first_s,
        wait_max=longest_s,
        wait_jitter=jitter_s,
    )
    async for attempt in retries:
        with attempt:
            result = await call()
            last_error.text = ""
            return result
    raise AssertionError("a retry context ends with a result or an error")


# --- Named waits: each has a subject, a reason, a start and a limit, and is listed while it lasts ---------------------


_MAX_TIMED_OUT = 16
"""Most waits that are retained for `Waits.take_timed_out`."""
_TIMEOUTS = Counter("rlboost_wait_timeouts", "Waits that reached their limit")


class Waits:
    """The current waits of one process."""

    def __init__(self) -> None:
        self._active: dict[int, tuple[Wait, Callable[[], str], _LastError]] = {}
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
        listed_s = min(limit_s, MAX_SECONDS)  # a job file may have any limit
        wait = Wait(subject=subject, because=because, since=time.time(), limit_s=listed_s, kind=kind)
        outer, last_error = _last_error.get(), _LastError()
        self._active[number] = (wait, progress, last_error)
        _last_error.set(last_error)
        try:
            async with asyncio.timeout(limit_s) as timer:
                yield
        except TimeoutError as error:
            if timer.expired():
                wait = _described(wait, "", last_error)
                count_timeout(subject, wait.because, limit_s)
                self._timed_out.append(wait)
                raise WaitTimedOut(f"waited {limit_s:.0f} s for {subject} ({wait.because})") from error
            raise
        except asyncio.CancelledError:
            if outer is not None:  # its limit may be why
                outer.text = last_error.text or outer.text
            raise
        finally:
            del self._active[number]
            _last_error.set(outer)

    def current(self) -> list[Wait]:
        """Return the current waits, oldest first."""
        waits = sorted(self._active.values(), key=lambda active: active[0].since)
        return [_described(wait, progress(), last_error) for wait, progress, last_error in waits]

    def take_timed_out(self) -> list[Wait]:
        """Return the waits that have reached their limit since the last call, oldest first."""
        waits = list(self._timed_out)
        self._timed_out.clear()
        return waits


def count_timeout(subject: str, because: str, limit_s: float, **ids: str) -> None:
    """Log and count a wait that has reached its limit; `ids` are added to the log line."""
    _TIMEOUTS.inc()
    log.warning("wait_timed_out", subject=subject, because=because, limit_s=limit_s, **ids)


def _described(wait: Wait, progress: str, last_error: _LastError) -> Wait:
    because = f"{wait.because}: {progress}" if progress else wait.because
    if last_error.text and last_error.text not in because:
        because += f"; the last try failed: {last_error.text}"
    return wait.model_copy(update={"because": because})


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, concurrency: int, name: str) -> None:
    """Run `work` on every item, `concurrency` at a time; the first error cancels the others and is raised."""
    remaining = iter(items)

    async def worker() -> None:
        for item in remaining:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(worker(), name=f"{name}-{number}")
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
