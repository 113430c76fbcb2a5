"""Waiting for a condition, in place of a sleep and a hope."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

LIMIT_S = 90.0
"""For what a test waits for: much longer than it takes, also where several processes share each processor."""


@overload
async def eventually(condition: Callable[[], Awaitable[T]], *, within_s: float = ..., every_s: float = ...) -> T: ...
@overload
async def eventually(condition: Callable[[], T], *, within_s: float = ..., every_s: float = ...) -> T: ...
async def eventually(condition: Callable[[], Any], *, within_s: float = LIMIT_S, every_s: float = 0.02) -> Any:
    """Poll `condition`, which may be async, until it returns something true; return that.

    An `AssertionError` counts as not yet; the last one is raised when the time is up. The limit is for what never
    comes: what must come soon is asserted with a `Stopwatch`.
    """
    limit, pause_s = time.monotonic() + within_s, min(0.001, every_s)
    while True:
        failure: AssertionError | None = None
        try:
            found = condition()
            value = await found if inspect.isawaitable(found) else found
            if value:
                return value
        except AssertionError as error:
            failure = error
        if time.monotonic() > limit:
            raise failure or AssertionError(f"not within {within_s} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, every_s)
