"""Publishing: one rank's shards become chunks in the weight store; the bytes that it has already are not sent.

As they arrive there, the store is told which chunks it has of the version: a draft, for workers that fetch ahead.

With `deltas` the last published bytes are remembered, and what a chunk has become is uploaded as a delta beside it; so
little is left to fetch that there is no draft.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NamedTuple

from shared.waiting import Waits
from shared.weights.client import StoreClient, persistently
from shared.weights.deltas import Cut, Delta, Memory
from shared.weights.drafting import Say, drafting
from shared.weights.edges import Edge, lists_of
from shared.weights.manifest import CHUNK_BYTES, ChunkRef, Part, TensorEntry, digest_of
from shared.weights.parallel import for_each
from shared.weights.wire import CommitRequest, VersionInfo

_WINDOW = 32
"""Chunks that are hashed while as many before them are uploaded: what is held of tensors made on the fly."""

_Blob = tuple[ChunkRef, memoryview]
_Piece = tuple[Cut, Delta | None]


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
        deltas: bool = False,
        small: bool = False,
    ) -> None:
        """Use an open client.

        Args:
            client: of the store to publish to.
            waits: where waits for it are listed.
            concurrency: chunks uploaded at a time.
            limit_s: how long the store may be away.
            chunk_bytes: size of a chunk.
            deltas: upload deltas too, which costs host memory for one copy of the rank's part.
            small: make the smallest ones, for workers behind slow links.

        """
        self._client = client
        self._waits = waits
        self._concurrency = concurrency
        self._limit_s = limit_s
        self._chunk_bytes = chunk_bytes
        self._memory = Memory(small=small) if deltas else None

    async def publish(self, job_id: str, version: int, rank: int, shards: Iterable[Shard]) -> Part:
        """Upload one rank's part. It is visible to nobody until `commit`, which wants its `digest`.

        `shards` is iterated in another thread, so it may copy from a device as it goes.

        Raises:
            Timeout: the store was away for too long.
            ValueError: a shard's shape, dtype and bytes do not agree.

        """
        entries: list[TensorEntry] = []
        refs: list[ChunkRef] = []
        edges: list[Edge] = []
        base = self._memory.begin(job_id, rank, version) if self._memory else -1
        pieces = _with_deltas(_cut(shards, self._chunk_bytes, entries), self._memory)
        try:
            waiting = self._wait(f"publish version {version} of job {job_id}, rank {rank}")
            async with waiting, self._drafting(job_id, version, rank) as say:
                async for window in self._windows(pieces, say):
                    refs += [cut.ref for cut, _ in window]
                    edges += [delta.edge for _, delta in window if delta]
                # Without any change there is a list too: it keeps the versions in a chain.
                encoded = lists_of(base, edges) if base >= 0 else []
                lists = [(ChunkRef(digest_of(data), len(data)), memoryview(data)) for data in encoded]
                await self._upload(lists, say)
                part = Part(rank=rank, chunks=tuple(refs), tensors=tuple(entries), edges=tuple(ref for ref, _ in lists))
                await persistently(lambda: self._client.put_part(job_id, version, part))
        except BaseException:
            self._forget()
            raise
        if self._memory:
            self._memory.end(version, len(refs))
        return part

    async def _windows(self, pieces: Iterator[_Piece], say: Say) -> AsyncIterator[list[_Piece]]:
        """Upload all pieces, and yield them when they are there."""
        window = await asyncio.to_thread(_take, pieces)
        while window:
            coming = asyncio.create_task(asyncio.to_thread(_take, pieces), name="weights-cut")
            try:
                await self._upload([blob for piece in window for blob in _blobs(piece)], say)
            finally:
                # A thread cannot be stopped: it must be through with the shards before the caller has them back.
                upcoming = await coming
            yield window
            window = upcoming

    def _forget(self) -> None:
        if self._memory:
            self._memory.forget()

    async def commit(
        self,
        job_id: str,
        version: int,
        *,
        expect: int,
        part_digests: Iterable[str],
        config_json: str,
        base_version: int | None = None,
        adapter_json: str = "",
        canary_json: str = "",
    ) -> VersionInfo:
        """Make published parts the new head, if the head is `expect` (-1: none). To repeat it is safe.

        Args:
            job_id: whose weights.
            version: above `expect`.
            expect: the version that must be the head.
            part_digests: `Part.digest` of every rank, rank 0 first.
            config_json: the model's Hugging Face configuration.
            base_version: where the parts are an adapter's, the version with the model that it belongs to.
            adapter_json: and PEFT's `adapter_config.json`.
            canary_json: `Manifest.canary_json`.

        Raises:
            Conflict: somebody else committed, the parts do not make up whole tensors, or the base is not kept; the
                text says which.
            Timeout: the store was away for too long.

        """
        request = CommitRequest(
            expect=expect,
            parts=tuple(part_digests),
            config_json=config_json,
            base_version=base_version,
            adapter_json=adapter_json,
            canary_json=canary_json,
        )
        try:
            async with self._wait(f"commit version {version} of job {job_id}"):
                return await persistently(lambda: self._client.commit(job_id, version, request))
        except BaseException:
            # Workers have what was committed: deltas to anything else would be of no use to them.
            self._forget()
            raise

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

    def _drafting(self, job_id: str, version: int, rank: int) -> AbstractAsyncContextManager[Say]:
        if self._memory:
            return nullcontext(_say_nothing)
        return drafting(self._client, job_id, version, rank)

    async def _upload(self, blobs: list[_Blob], say: Say) -> None:
        by_digest = {ref.digest: (ref, data) for ref, data in blobs}
        refs = [ref for ref, _ in by_digest.values()]
        if not refs:
            return
        missing = await persistently(lambda: self._client.missing(refs))
        say(ref for ref in refs if ref.digest not in missing)

        async def send(digest: str) -> None:
            ref, data = by_digest[digest]
            await persistently(lambda: self._client.put_chunk(ref, data))
            say([ref])

        await for_each(missing, send, concurrency=self._concurrency, name="weights-upload")


def _say_nothing(_: Iterable[ChunkRef]) -> None:
    pass


def _take(pieces: Iterator[_Piece]) -> list[_Piece]:
    return list(itertools.islice(pieces, _WINDOW))


def _blobs(piece: _Piece) -> Iterator[_Blob]:
    cut, delta = piece
    yield cut.ref, cut.data
    if delta:
        yield delta.edge.blob, memoryview(delta.data)


def _with_deltas(cuts: Iterator[Cut], memory: Memory | None) -> Iterator[_Piece]:
    for index, cut in enumerate(cuts):
        yield cut, memory.exchange(index, cut) if memory else None


def _cut(shards: Iterable[Shard], chunk_bytes: int, entries: list[TensorEntry]) -> Iterator[Cut]:
    """Lay the shards end to end and cut; add each shard to `entries`. Only chunks of several shards are copied."""
    pieces: list[tuple[memoryview, str]] = []
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
            piece, data = data[:room], data[room:]
            pieces.append((piece, shard.dtype))
            room -= len(piece)
            if not room:
                yield _chunk(pieces)
                pieces, room = [], chunk_bytes
    if pieces:
        yield _chunk(pieces)


def _chunk(pieces: list[tuple[memoryview, str]]) -> Cut:
    data = pieces[0][0] if len(pieces) == 1 else memoryview(b"".join(piece for piece, _ in pieces))
    share: Counter[str] = Counter()
    for piece, dtype in pieces:
        share[dtype] += len(piece)
    return Cut(ChunkRef(digest_of(data), len(data)), data, share.most_common(1)[0][0])


def _flat(data: memoryview | bytes | bytearray) -> memoryview:
    view = memoryview(data)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
