"""Drafts: which chunks of a version that is still being uploaded are in the store already.

A draft is a hint for those who would have the chunks before the commit. It is no version: nobody loads it, nobody keeps
it, and what it says may be wrong. Each rank's list grows as the rank uploads; who publishes a version anew begins its
list anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import NonNegativeInt

from shared.weights.manifest import ChunkRef, Document


class DraftPart(Document):
    """What is in the store of one rank's chunks, in the order of arrival."""

    rank: NonNegativeInt
    start: NonNegativeInt
    """How many chunks of this rank come before; what was said from there on is void."""
    chunks: tuple[ChunkRef, ...]


class DraftNews(Document):
    """What is new of a job's draft."""

    cursor: NonNegativeInt
    """To ask for what comes later."""
    version: NonNegativeInt | None = None
    """Which version is being uploaded; None where nothing is new."""
    parts: tuple[DraftPart, ...] = ()


class Listing:
    """What one rank has said so far; the beginning may be missing."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.first = 0
        """Place in the rank's list of the first chunk that is known."""
        self.chunks: list[ChunkRef] = []

    def put(self, start: int, chunks: Sequence[ChunkRef]) -> None:
        """Take the chunks from place `start` on; what was known from there on is void."""
        if not self.first <= start <= self.first + len(self.chunks):
            # Somebody forgot what came before: the store, when it was restarted.
            self.first, self.chunks = start, []
        self.chunks[start - self.first :] = chunks

    def since(self, start: int) -> tuple[ChunkRef, ...]:
        """Return what is known from place `start` on."""
        return tuple(self.chunks[max(0, start - self.first) :])


class Draft:
    """The draft of one job, as somebody knows it who asks for news of it."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.version = -1
        self._ranks: dict[int, Listing] = {}

    def take(self, news: DraftNews) -> None:
        """Take what is new; a store that knows of no draft says nothing of the one that is known here."""
        if news.version is None:
            return
        if news.version != self.version:
            self.version, self._ranks = news.version, {}
        for part in news.parts:
            self._ranks.setdefault(part.rank, Listing()).put(part.start, part.chunks)

    def chunks(self) -> Iterator[ChunkRef]:
        """Yield every different chunk once."""
        yield from dict.fromkeys(chunk for listing in self._ranks.values() for chunk in listing.chunks)
