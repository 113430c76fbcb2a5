"""Following a draft: asking the store what is new of it, and having that fetched ahead."""

from __future__ import annotations

from shared.weights.client import StoreClient
from shared.weights.drafts import Draft
from shared.weights.puller import Puller

_WAIT_S = 5.0
"""How long the store keeps a question open; somebody who takes up another job asks for that one's then."""


class DraftFollower:
    """Brings chunks of versions that are being uploaded into a puller's cache."""

    def __init__(self, client: StoreClient, puller: Puller) -> None:
        """Ask the store of an open client."""
        self._client = client
        self._puller = puller
        self._job_id = ""
        self._cursor = -1
        self._draft = Draft()

    async def follow(self, job_id: str) -> None:
        """Wait for some seconds for something new of a job's draft, and bring it into the cache.

        Raises:
            StoreUnavailable: the store is away.
            NotFound: it knows of no drafts.
            Timeout: it was away for too long in the middle.
            Fatal: the cache's disk is full.

        """
        if job_id != self._job_id:
            self._job_id, self._cursor, self._draft = job_id, -1, Draft()
        news = await self._client.draft(job_id, after=self._cursor, wait_s=_WAIT_S)
        self._cursor = news.cursor
        self._draft.take(news)
        if chunks := [chunk for part in news.parts for chunk in part.chunks]:
            await self._puller.prefetch(job_id, self._draft, chunks)
