"""Ports of the weight store: content-addressed chunks, and documents (versions, manifests, parts, edges).

The caller passes the time (Unix seconds). A chunk is "used" when it is uploaded or checked by `missing`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.shared.errors import DiskFull, Unprocessable
from rlboost.shared.weights.manifest import ChunkRef


class BadChunk(Unprocessable):
    """Uploaded bytes do not have the digest in their URL."""


class StoreFull(DiskFull):
    """The disk is full, or the store's limit is reached; the failed write left no file."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A chunk in a local file."""

    path: Path
    status: os.stat_result


@dataclass(frozen=True, slots=True)
class Redirect:
    """A chunk in the object store, at a signed URL that is valid for some minutes."""

    url: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Proxied:
    """A chunk that this process reads from the object store for the client."""

    n_bytes: int
    blocks: Callable[[int, int], Awaitable[AsyncIterator[bytes]]]
    """Takes start and end (exclusive) of the range; raises what `Chunks.read` raises."""


ChunkLocation = LocalFile | Redirect | Proxied


class Chunks(Protocol):
    """Chunks by BLAKE3 digest. A chunk is written atomically, even if the process is killed.

    With an object store every method raises `StoreUnavailable` while it does not answer.
    """

    async def put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
        """Store the concatenated blocks; an existing chunk is replaced.

        Raises:
            BadChunk: they do not have the digest.
            StoreFull: the disk is full.

        """

    async def sync(self) -> None:
        """Make every chunk that was put survive a power failure."""

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        """Return the digests that are missing or have another size, and mark the others as used at `now`."""

    async def read(self, digest: str) -> bytes:
        """Return a chunk's bytes, unverified; raises `NotFound`."""

    async def read_into(self, digest: str, buffer: bytearray) -> memoryview:
        """Return a chunk's bytes, writable and unverified, in `buffer` or elsewhere; raises `NotFound`."""

    async def source(self, digest: str) -> ChunkLocation:
        """Return the location of a chunk's bytes; raises `NotFound`."""

    async def n_bytes(self) -> int:
        """Return the total size of all chunks."""

    async def last_used(self) -> dict[str, float]:
        """Return digest -> time of last use, for all chunks."""

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        """Remove the chunks, except those used after the given time."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part that waits for its commit."""

    version: int
    rank: int
    staged_at: float


class Documents(Protocol):
    """Versions, manifests, edges and parts. Each is replaced atomically, even if the process is killed.

    Every write raises `StoreFull` if the disk is full. With an object store every method raises `StoreUnavailable`
    while it does not answer, and every write raises `Fenced` after another process has taken the lease.
    """

    async def jobs(self) -> list[str]:
        """Return the ids of all jobs with documents."""

    async def versions_of(self, job_id: str) -> JobVersions:
        """Return a job's versions, none before the first commit."""

    async def save_versions(self, job: JobVersions) -> None:
        """Replace a job's versions: this is the atomic step of a commit."""

    async def put_manifest(self, job_id: str, version: int, data: bytes) -> None:
        """Write a manifest; it becomes visible when the job's versions include it."""

    async def manifest(self, job_id: str, version: int) -> bytes:
        """Return a manifest; raises `NotFound`."""

    async def remove_manifest(self, job_id: str, version: int) -> None:
        """Remove a manifest, if it exists."""

    async def put_edges(self, job_id: str, version: int, data: bytes) -> None:
        """Replace the edges to a version; they become visible when the job's versions include it."""

    async def edges(self, job_id: str, version: int) -> bytes:
        """Return the edges to a version; raises `NotFound`."""

    async def edge_versions(self, job_id: str) -> list[int]:
        """Return the versions of a job that have edges, in ascending order."""

    async def remove_edges(self, job_id: str, version: int) -> None:
        """Remove the edges to a version, if they exist."""

    async def put_part(self, job_id: str, part: StagedPart, data: bytes) -> None:
        """Write a part; replaces an earlier one of that version and rank."""

    async def part(self, job_id: str, version: int, rank: int) -> bytes:
        """Return a part; raises `NotFound`."""

    async def parts(self, job_id: str) -> list[StagedPart]:
        """Return the staged parts of a job."""

    async def remove_part(self, job_id: str, part: StagedPart) -> None:
        """Remove a part, if it exists."""
