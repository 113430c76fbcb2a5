"""Bounded concurrency over many items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


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
