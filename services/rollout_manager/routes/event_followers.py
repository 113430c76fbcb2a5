"""Clients that follow the events and logs of jobs: one read of Redis at a time waits for all of them.

Consumes: the streams of the followed jobs.
Produces: for each follower, the entries after its own position.
Waits for: the next entry of any followed stream, in `Bus.read`, for `BLOCK_S` at a time.
Ends when: the client disconnects, or the job has ended and all its entries are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlboost.shared.http.problem import Problem
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.entries import Entry, position

MAX_FOLLOWERS = 1024
"""Open streams of one manager; beyond it, requests are rejected with 429."""
MAX_READS = 8
"""Reads of followers at once, each of which takes one of the bus's connections."""
BATCH = 512
BLOCK_S = 0.25
"""How long one read waits for all followers; a new follower waits for its end."""
IDLE_S = 1.0
"""How often a follower without a new entry gets None."""


@dataclass(slots=True, eq=False)
class _Follower:
    """One follower that has read everything up to its cursors."""

    cursors: dict[str, str]
    """Stream that it follows -> id of the last entry read."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EventFollowers:
    """All followers of one manager."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reads = asyncio.Semaphore(MAX_READS)
        self._turn = asyncio.Lock()
        """Held by the follower whose read waits for all."""
        self._waiting: set[_Follower] = set()
        self._n = 0

    def check_limit(self) -> None:
        """Reject one more follower if there are too many.

        Raises:
            Problem: 429.

        """
        if self._n >= MAX_FOLLOWERS:
            detail = f"{self._n} clients follow events, the most that are possible: close some, or try again later"
            raise Problem(429, "Too many followers", detail, headers={"Retry-After": "5"})

    async def follow(
        self,
        cursors: Mapping[str, str],
        is_over: Callable[[], Awaitable[bool]],
        is_disconnected: Callable[[], Awaitable[bool]],
    ) -> AsyncIterator[Entry | None]:
        """Yield the entries of streams after a cursor in each, and None while there is no new one.

        Older entries come first, by their ids. Ends when the client has disconnected, or once `is_over` is true and all
        entries that were written before are read.
        """
        self._n += 1
        cursors = dict(cursors)
        try:
            while not await is_disconnected():
                over = await is_over()
                async with self._reads:
                    entries = in_order(await self._bus.read(cursors, count=BATCH))
                for entry in entries:
                    cursors[entry.stream] = entry.id
                    yield entry
                if not entries and over:
                    return
                if not entries and not await self._wait_for_entry(_Follower(cursors)):
                    yield None
        finally:
            self._n -= 1

    async def _wait_for_entry(self, follower: _Follower) -> bool:
        """Wait up to `IDLE_S`; return True as soon as a stream of the follower has a new entry."""
        limit = time.monotonic() + IDLE_S
        self._waiting.add(follower)
        try:
            while not follower.changed.is_set() and time.monotonic() < limit:
                if self._turn.locked():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(BLOCK_S):
                            await follower.changed.wait()
                else:
                    async with self._turn:
                        await self._read_for_all()
        finally:
            self._waiting.discard(follower)
        return follower.changed.is_set()

    async def _read_for_all(self) -> None:
        cursors: dict[str, str] = {}
        for follower in self._waiting:
            for stream, cursor in follower.cursors.items():
                cursors[stream] = min(cursor, cursors.get(stream, cursor), key=position)
        changed = {entry.stream for entry in await self._bus.read(cursors, count=1, block_s=BLOCK_S)}
        for follower in self._waiting:
            if not changed.isdisjoint(follower.cursors):
                follower.changed.set()


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries by id, without those that an unread entry of another stream may precede: they are read again."""
    ids: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        ids[entry.stream].append(entry.id)
    # A stream with a whole batch may have more.
    ends = [position(of_stream[-1]) for of_stream in ids.values() if len(of_stream) >= BATCH]
    ordered = sorted(entries, key=lambda entry: position(entry.id))
    return [entry for entry in ordered if position(entry.id) <= min(ends)] if ends else ordered
