"""Waiting for a condition, in place of a sleep and a hope."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")


@overload
async def eventually(condition: Callable[[], Awaitable[T]], *, within_s: float = ..., every_s: float = ...) -> T: ...
@overload
async def eventually(condition: Callable[[], T], *, within_s: float = ..., every_s: float = ...) -> T: ...
async def eventually(condition: Callable[[], Any], *, within_s: float = 10.0, every_s: float = 0.02) -> Any:
    """Poll `condition`, which may be async, until it returns something true; return that.

    An `AssertionError` counts as not yet; the last one is raised when the time is up.
    """
    limit = time.monotonic() + within_s
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
        await asyncio.sleep(every_s)
