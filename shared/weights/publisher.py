"""Publishing: one rank's shards become chunks in the weight store; the bytes that it has already are not sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from shared.waiting import Waits
from shared.weights.client import StoreClient, persistently
from shared.weights.manifest import CHUNK_BYTES, ChunkRef, Part, TensorEntry, digest_of
from shared.weights.parallel import for_each
from shared.weights.wire import CommitRequest, VersionInfo

_WINDOW = 32
"""Chunks that are hashed while as many before them are uploaded: what is held of tensors made on the fly."""


_Cut = tuple[ChunkRef, memoryview]


class Shard(NamedTuple):
    """One rank's box of a tensor, its bytes C-contiguous in any buffer; they must not change until `publish` returns.

    With torch: `tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data`.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    data: memoryview | bytes | bytearray


class Publisher:
    """Puts versions into one weight store, and outlives its restarts up to `limit_s` a call."""

    def __init__(
        self,
        client: StoreClient,
        waits: Waits,
        *,
        concurrency: int = 8,
        limit_s: float = 600.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Use an open client."""
        self._client = client
        self._waits = waits
        self._concurrency = concurrency
        self._limit_s = limit_s
        self._chunk_bytes = chunk_bytes

    async def publish(self, job_id: str, version: int, rank: int, shards: Iterable[Shard]) -> Part:
        """Upload one rank's part. It is visible to nobody until `commit`, which wants its `digest`.

        `shards` is iterated in another thread, so it may copy from a device as it goes.

        Raises:
            Timeout: the store was away for too long.
            ValueError: a shard's shape, dtype and bytes do not agree.

        """
        entries: list[TensorEntry] = []
        refs: list[ChunkRef] = []
        cuts = _cut(shards, self._chunk_bytes, entries)
        async with self._wait(f"publish version {version} of job {job_id}, rank {rank}"):
            window = await asyncio.to_thread(_take, cuts)
            while window:
                coming = asyncio.create_task(asyncio.to_thread(_take, cuts), name="weights-cut")
                try:
                    await self._upload(window)
                finally:
                    # A thread cannot be stopped: it must be through with the shards before the caller has them back.
                    upcoming = await coming
                refs += [ref for ref, _ in window]
                window = upcoming
            part = Part(rank=rank, chunks=tuple(refs), tensors=tuple(entries))
            await persistently(lambda: self._client.put_part(job_id, version, part))
        return part

    async def commit(
        self, job_id: str, version: int, *, expect: int, part_digests: Iterable[str], config_json: str
    ) -> VersionInfo:
        """Make published parts the new head, if the head is `expect` (-1: none). To repeat it is safe.

        Args:
            job_id: whose weights.
            version: above `expect`.
            expect: the version that must be the head.
            part_digests: `Part.digest` of every rank, rank 0 first.
            config_json: the model's Hugging Face configuration.

        Raises:
            Conflict: somebody else committed, or the parts do not make up whole tensors; the text says which.
            Timeout: the store was away for too long.

        """
        request = CommitRequest(expect=expect, parts=tuple(part_digests), config_json=config_json)
        async with self._wait(f"commit version {version} of job {job_id}"):
            return await persistently(lambda: self._client.commit(job_id, version, request))

    async def head(self, job_id: str) -> VersionInfo | None:
        """Return the newest committed version, None before the first."""
        async with self._wait(f"head of job {job_id}"):
            return await persistently(lambda: self._client.head(job_id))

    async def pin(self, job_id: str, version: int) -> None:
        """Keep a committed version, for a checkpoint say, until `unpin`."""
        async with self._wait(f"pin version {version} of job {job_id}"):
            await persistently(lambda: self._client.pin(job_id, version))

    async def unpin(self, job_id: str, version: int) -> None:
        """Let a version go when it is no longer among the newest."""
        async with self._wait(f"unpin version {version} of job {job_id}"):
            await persistently(lambda: self._client.unpin(job_id, version))

    def _wait(self, what: str) -> AbstractAsyncContextManager[None]:
        return self._waits.on(f"the weight store at {self._client.url}", because=what, limit_s=self._limit_s)

    async def _upload(self, window: list[_Cut]) -> None:
        by_digest = {ref.digest: (ref, data) for ref, data in window}
        refs = [ref for ref, _ in by_digest.values()]
        missing = await persistently(lambda: self._client.missing(refs))

        async def send(digest: str) -> None:
            ref, data = by_digest[digest]
            await persistently(lambda: self._client.put_chunk(ref, data))

        await for_each(missing, send, concurrency=self._concurrency, name="weights-upload")


def _take(cuts: Iterator[_Cut]) -> list[_Cut]:
    return list(itertools.islice(cuts, _WINDOW))


def _cut(shards: Iterable[Shard], chunk_bytes: int, entries: list[TensorEntry]) -> Iterator[_Cut]:
    """Lay the shards end to end and cut; add each shard to `entries`. Only chunks of several shards are copied."""
    pieces: list[memoryview] = []
    start, room = 0, chunk_bytes
    for shard in shards:
        data = _flat(shard.data)
        entries.append(
            TensorEntry(
                name=shard.name,
                dtype=shard.dtype,
                global_shape=shard.global_shape,
                offset=shard.offset,
                local_shape=shard.local_shape,
                start=start,
                n_bytes=len(data),
                digest=digest_of(data),
            )
        )
        start += len(data)
        while data:
            pieces.append(data[:room])
            data = data[room:]
            room -= len(pieces[-1])
            if not room:
                yield _chunk(pieces)
                pieces, room = [], chunk_bytes
    if pieces:
        yield _chunk(pieces)


def _chunk(pieces: list[memoryview]) -> _Cut:
    data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    return ChunkRef(digest_of(data), len(data)), data


def _flat(data: memoryview | bytes | bytearray) -> memoryview:
    view = memoryview(data)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
