"""What the weight store needs of the outside: chunks by content, and the documents that say what they are.

Times are given by the caller (Unix seconds): "used at" is when a chunk was uploaded or last asked for.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.weight_store.domain.versions import Model
from shared.errors import Bury, Fatal
from shared.weights.manifest import ChunkRef


class BadChunk(Bury):
    """Uploaded bytes do not have the digest that they were uploaded under."""


class StoreFull(Fatal):
    """There is no room; nothing of what was to be written remains."""


@dataclass(frozen=True, slots=True)
class InFile:
    """A chunk's bytes are in this file."""

    path: Path
    status: os.stat_result


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A chunk's bytes can be had at this URL, for some minutes, by whoever knows it."""

    url: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Through:
    """A chunk's bytes come through this process."""

    n_bytes: int
    blocks: Callable[[int, int], Awaitable[AsyncIterator[bytes]]]
    """Of the bytes from a first one up to, and without, a last one; raises what `Chunks.read` raises."""


Source = InFile | Elsewhere | Through


class Chunks(Protocol):
    """Chunks, by BLAKE3 digest. A chunk is there whole or not at all, whenever the process is killed.

    Where they are in an object store, every method raises `StoreUnavailable` while that does not answer.
    """

    async def put(self, digest: str, blocks: Sequence[bytes], now: float) -> None:
        """Store the blocks, joined; replaces what is there.

        Raises:
            BadChunk: they do not have the digest.
            StoreFull: there is no room.

        """

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        """Return the digests that are not there in the right size, and mark the others as used at `now`."""

    async def read(self, digest: str) -> bytes:
        """Return a chunk's bytes as they are stored, raising `NotFound`."""

    async def source(self, digest: str) -> Source:
        """Return where a chunk's bytes are, raising `NotFound`."""

    async def last_used(self) -> dict[str, float]:
        """Return when each chunk was last used."""

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        """Remove each of these chunks unless it was used after its time."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part that waits for its commit, and since when."""

    version: int
    rank: int
    staged_at: float


class Documents(Protocol):
    """Models, manifests and parts. Each is replaced atomically: a reader, and a restart, finds the old or the new.

    Every write raises `StoreFull` when there is no room. Where they are in an object store, every method raises
    `StoreUnavailable` while that does not answer, and every write `Fenced` when another process has taken over.
    """

    async def jobs(self) -> list[str]:
        """Return the ids of all jobs of which there is anything."""

    async def model(self, job_id: str) -> Model:
        """Return a job's model, an empty one before the first commit."""

    async def save_model(self, model: Model) -> None:
        """Replace a model: the moment at which a commit takes place."""

    async def put_manifest(self, job_id: str, version: int, data: bytes) -> None:
        """Write a manifest; it counts once its model names it."""

    async def manifest(self, job_id: str, version: int) -> bytes:
        """Return a manifest, raising `NotFound`."""

    async def remove_manifest(self, job_id: str, version: int) -> None:
        """Remove a manifest; nothing happens when it is not there."""

    async def put_edges(self, job_id: str, version: int, data: bytes) -> None:
        """Replace the edges to a version; they count once its model names it."""

    async def edges(self, job_id: str, version: int) -> bytes:
        """Return the edges to a version, raising `NotFound`."""

    async def edge_versions(self, job_id: str) -> list[int]:
        """Return the versions of a job to which there are edges, in order."""

    async def remove_edges(self, job_id: str, version: int) -> None:
        """Remove the edges to a version; nothing happens when there are none."""

    async def put_part(self, job_id: str, part: StagedPart, data: bytes) -> None:
        """Write a part, in place of the one of that version and rank."""

    async def part(self, job_id: str, version: int, rank: int) -> bytes:
        """Return a part, raising `NotFound`."""

    async def parts(self, job_id: str) -> list[StagedPart]:
        """Return which parts of a job wait."""

    async def remove_part(self, job_id: str, part: StagedPart) -> None:
        """Remove a part; nothing happens when it is not there."""
