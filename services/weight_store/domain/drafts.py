"""Which drafts are known, and what is new of one for somebody who knows a part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from shared.weights.drafts import DraftNews, DraftPart, Listing
from shared.weights.manifest import ChunkRef

MAX_CHUNKS = 1 << 18
"""Of all drafts together: a TiB of chunks of 4 MiB. They are kept in memory."""


@dataclass(slots=True)
class _Rank:
    listing: Listing = field(default_factory=Listing)
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(cursor, place from which on the list changed), both ascending: what a later change covers is left out."""

    def put(self, cursor: int, part: DraftPart) -> None:
        while self.changes and self.changes[-1][1] >= part.start:
            self.changes.pop()
        self.changes.append((cursor, part.start))
        self.listing.put(part.start, part.chunks)

    def changed_from(self, after: int) -> int | None:
        index = bisect_right(self.changes, after, key=itemgetter(0))
        return self.changes[index][1] if index < len(self.changes) else None


@dataclass(slots=True)
class _Draft:
    version: int
    began: int
    """The cursor before its first change."""
    touched_at: float
    ranks: dict[int, _Rank] = field(default_factory=dict)

    @property
    def n_chunks(self) -> int:
        return sum(len(rank.listing.chunks) for rank in self.ranks.values())


class Drafts:
    """One draft a job: the one that somebody uploads now."""

    def __init__(self, first: int) -> None:
        """Count changes from `first` on: above what an earlier process counted to, so that nobody misses any."""
        self.cursor = first
        self._drafts: dict[str, _Draft] = {}

    def put(self, job_id: str, version: int, part: DraftPart, now: float) -> bool:
        """Take what a publisher says; tell whether there was room for it."""
        draft = self._drafts.get(job_id)
        if sum(known.n_chunks for known in self._drafts.values()) + len(part.chunks) > MAX_CHUNKS:
            return False
        if not part.chunks:
            return True
        if draft is None or draft.version != version:
            draft = self._drafts[job_id] = _Draft(version, self.cursor, now)
        self.cursor += 1
        draft.touched_at = now
        draft.ranks.setdefault(part.rank, _Rank()).put(self.cursor, part)
        return True

    def complete(self, job_id: str, version: int, rank: int, chunks: Sequence[ChunkRef], now: float) -> None:
        """Take all chunks of a rank that was talked of and is through, so that no publisher needs to repeat a hint."""
        draft = self._drafts.get(job_id)
        if draft is None or draft.version != version or (known := draft.ranks.get(rank)) is None:
            return
        said = set(known.listing.chunks)
        unsaid = tuple(chunk for chunk in dict.fromkeys(chunks) if chunk not in said)
        start = known.listing.first + len(known.listing.chunks)
        self.put(job_id, version, DraftPart(rank=rank, start=start, chunks=unsaid), now)

    def end(self, job_id: str, version: int) -> None:
        """Forget the draft of a version that is committed, or of an older one."""
        if (draft := self._drafts.get(job_id)) is not None and draft.version <= version:
            del self._drafts[job_id]

    def expire(self, before: float) -> None:
        """Forget the drafts of which nothing was said since then."""
        self._drafts = {job_id: draft for job_id, draft in self._drafts.items() if draft.touched_at >= before}

    def news(self, job_id: str, after: int) -> DraftNews | None:
        """Return what changed after the cursor `after`, everything where that is another draft's; None for nothing."""
        draft = self._drafts.get(job_id)
        if draft is None:
            return None
        known = draft.began <= after <= self.cursor
        parts = []
        for number, rank in sorted(draft.ranks.items()):
            start = rank.changed_from(after) if known else rank.listing.first
            if start is not None:
                parts.append(DraftPart(rank=number, start=start, chunks=rank.listing.since(start)))
        return DraftNews(cursor=self.cursor, version=draft.version, parts=tuple(parts)) if parts else None
