"""Saying what is uploaded: a publisher's hints to those who would have the chunks before the commit.

They are sent beside the upload and never delay it; one that the store does not take changes nothing but the time at
which workers begin to fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import structlog

from shared.errors import RLBoostError, StoreUnavailable
from shared.weights.client import StoreClient
from shared.weights.drafts import DraftPart
from shared.weights.manifest import ChunkRef

log = structlog.get_logger(__name__)

_FROM = 8
"""Chunks: of fewer nothing is said, the commit comes too soon after."""
_AT_ONCE = 1024
"""Chunks in one request."""
_LIMIT_S = 10.0
"""For one request."""

Say = Callable[[Iterable[ChunkRef]], None]
"""Takes chunks that are in the store now."""


@asynccontextmanager
async def drafting(client: StoreClient, job_id: str, version: int, rank: int) -> AsyncIterator[Say]:
    """Tell the store of what the body says, until the body ends."""
    hints = _Hints(client, job_id, version, rank)
    sending = asyncio.create_task(hints.send(), name=f"weights-draft-{job_id}-{version}-{rank}")
    try:
        yield hints.say
    finally:
        sending.cancel()
        await asyncio.wait({sending})


class _Hints:
    def __init__(self, client: StoreClient, job_id: str, version: int, rank: int) -> None:
        self._client = client
        self._job_id, self._version, self._rank = job_id, version, rank
        self._n_said = 0
        self._unsaid: list[ChunkRef] = []
        self._more = asyncio.Event()

    def say(self, chunks: Iterable[ChunkRef]) -> None:
        self._unsaid.extend(chunks)
        if self._unsaid and self._n_said + len(self._unsaid) >= _FROM:
            self._more.set()

    async def send(self) -> None:
        """Send what was said, all that has gathered at a time."""
        while True:
            await self._more.wait()
            self._more.clear()
            chunks = tuple(self._unsaid[:_AT_ONCE])
            part = DraftPart(rank=self._rank, start=self._n_said, chunks=chunks)
            try:
                async with asyncio.timeout(_LIMIT_S):
                    await self._client.put_draft(self._job_id, self._version, part)
            except (StoreUnavailable, TimeoutError):
                continue  # the next chunk that is uploaded shows that the store is back
            except RLBoostError as error:
                log.warning("draft_refused", job=self._job_id, version=self._version, error=str(error))
                return
            del self._unsaid[: len(chunks)]
            self._n_said += len(chunks)
            self.say(())
