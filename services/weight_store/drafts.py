"""The drafts that this store was told of, in memory only: a store that restarts has forgotten them, and nobody waits.

`expire` consumes nothing; once a minute it forgets drafts that somebody abandoned, and at the stop it sends away who
waits for news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from services.weight_store.domain.drafts import MAX_CHUNKS, Drafts
from shared.lifecycle import until_stop
from shared.weights.drafts import DraftNews, DraftPart
from shared.weights.manifest import Part

log = structlog.get_logger(__name__)

MAX_WAIT_S = 20.0
"""Longest time that a request for news is kept waiting: below the time after which clients believe the store away."""
_ABANDONED_S = 600.0
"""As long as a publisher waits for a store that is away."""
_EXPIRE_INTERVAL_S = 60.0


class DraftBoard:
    """Publishers write here, and reserved workers wait here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know nothing yet; `clock` gives Unix seconds."""
        self._clock = clock
        self._drafts = Drafts(first=int(clock() * 1000))
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, job_id: str, version: int, part: DraftPart) -> None:
        """Take a hint."""
        if not self._drafts.put(job_id, version, part, self._clock()):
            log.debug("draft_ignored", job=job_id, version=version, rank=part.rank, limit_chunks=MAX_CHUNKS)
        self._wake()

    def complete(self, job_id: str, version: int, part: Part) -> None:
        """Add what was not said of a rank that is through, where something was."""
        self._drafts.complete(job_id, version, part.rank, part.chunks, self._clock())
        self._wake()

    def end(self, job_id: str, version: int) -> None:
        """Forget a draft whose version, or a later one, is committed."""
        self._drafts.end(job_id, version)

    async def news(self, job_id: str, after: int, wait_s: float) -> DraftNews:
        """Return what came after the cursor `after`, as soon as there is something; nothing after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while (news := self._drafts.news(job_id, after)) is None and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            news = None
        return news or DraftNews(cursor=self._drafts.cursor)

    async def expire(self, stop: asyncio.Event) -> None:
        """Forget abandoned drafts until the stop."""
        while not await until_stop(stop, _EXPIRE_INTERVAL_S):
            self._drafts.expire(self._clock() - _ABANDONED_S)
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
