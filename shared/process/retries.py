"""Retries of calls to something that is unavailable for a while.

`logs.configure` logs the first try that failed, and every tenth.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import stamina

T = TypeVar("T")


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

    Args:
        unavailable: the errors after which the call is repeated; any other is raised.
        call: makes the call.
        limit_s: how long it is repeated before the last error is raised; None if the caller limits the time.
        first_s: pause before the second try; each pause is twice the one before.
        longest_s: the longest pause.
        jitter_s: up to this much is added to a pause at random, up to `longest_s`.

    """
    retries = stamina.retry_context(
        on=unavailable,
        attempts=None,
        timeout=limit_s,
        wait_initial=first_s,
        wait_max=longest_s,
        wait_jitter=jitter_s,
    )
    async for attempt in retries:
        with attempt:
            return await call()
    raise AssertionError("a retry context ends with a result or an error")
