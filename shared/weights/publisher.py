"""Publishes one rank's shards as chunks; chunks that the store already has are not sent.

With `deltas` the last published version is retained in host memory, and of a changed chunk only the delta is sent: the
store applies it and verifies the result. A chunk that the store cannot derive is sent whole.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import NamedTuple

import structlog

from rlboost.shared.process.waiting import Waits, for_each
from rlboost.shared.progress import TransferProgress
from rlboost.shared.weights.client import StoreClient, retry_unavailable
from rlboost.shared.weights.delta import encode_delta
from rlboost.shared.weights.delta_graph import Edge, lists_of
from rlboost.shared.weights.manifest import (
    CHUNK_BYTES,
    ITEM_BYTES,
    Chunk,
    ChunkRef,
    Part,
    Shard,
    TensorEntry,
    digest_of,
    split,
)
from rlboost.shared.weights.rest_models import CommitRequest, VersionInfo

log = structlog.get_logger(__name__)

_UPLOADS = 8
"""At the same time."""
_WINDOW = 32
"""Chunks hashed while the previous window is uploaded: bounds the memory for tensors produced on the fly."""


class Delta(NamedTuple):
    """An edge to a new chunk, and the encoded delta."""

    edge: Edge
    data: bytes


_Blob = tuple[ChunkRef, memoryview]
_ChunkUpdate = tuple[Chunk, Delta | None]


class Publisher:
    """Publishes versions to one weight store; each call waits up to `limit_s` for an unavailable store."""

    def __init__(
        self,
        client: StoreClient,
        waits: Waits,
        *,
        limit_s: float = 600.0,
        chunk_bytes: int = CHUNK_BYTES,
        deltas: bool = False,
    ) -> None:
        """Use an open client.

        Args:
            client: the weight store's client.
            waits: registry in which waits for the store are listed.
            limit_s: maximum outage of the store.
            chunk_bytes: size of a chunk.
            deltas: upload deltas instead of changed chunks; needs host memory for one copy of the rank's part.

        """
        self._client = client
        self._waits = waits
        self._limit_s = limit_s
        self._chunk_bytes = chunk_bytes
        self._encoder = DeltaEncoder() if deltas else None
        self._part_bytes: dict[tuple[str, int], int] = {}
        """(job, rank) -> size of its last part, which is that of the next one."""

    async def publish(self, job_id: str, version: int, rank: int, shards: Iterable[Shard]) -> Part:
        """Upload one rank's part. It becomes visible with `commit`, which takes its `digest`.

        `shards` is iterated in another thread, so it may copy from a device lazily.

        Raises:
            WaitTimedOut: the store was unavailable for too long.
            ValueError: a shard's shape, dtype and bytes do not agree.

        """
        entries: list[TensorEntry] = []
        refs: list[ChunkRef] = []
        edges: list[Edge] = []
        base = self._encoder.begin(job_id, rank, version) if self._encoder else -1
        progress = TransferProgress()
        progress.total_bytes = self._part_bytes.get((job_id, rank), 0)
        updates = _with_deltas(split(shards, self._chunk_bytes, entries), self._encoder)
        with ExitStack() as on_error:
            on_error.callback(self._reset_deltas)
            async with self._wait(f"publish version {version} of job {job_id}, rank {rank}", progress.text):
                async for window in self._windows(updates):
                    refs += [chunk.ref for chunk, _ in window]
                    progress.done_bytes += sum(chunk.ref.n_bytes for chunk, _ in window)
                    edges += [delta.edge for _, delta in window if delta]
                # An empty list is uploaded too: it links the version to its base.
                encoded = lists_of(base, edges) if base >= 0 else []
                lists = [(ChunkRef(digest_of(data), len(data)), memoryview(data)) for data in encoded]
                await self._upload(lists)
                part = Part(rank=rank, chunks=tuple(refs), tensors=tuple(entries), edges=tuple(ref for ref, _ in lists))
                await retry_unavailable(lambda: self._client.put_part(job_id, version, part))
            on_error.pop_all()
        if self._encoder:
            self._encoder.end(version, len(refs))
        self._part_bytes[job_id, rank] = progress.done_bytes
        return part

    async def _windows(self, updates: Iterator[_ChunkUpdate]) -> AsyncIterator[list[_ChunkUpdate]]:
        """Upload all chunks and deltas; yield each window once it is in the store."""
        window = await _next_window(updates)
        while window:
            next_window = asyncio.create_task(_next_window(updates), name="weights-split")
            try:
                blobs = [blob for update in window for blob in _blobs(update)]
                await self._upload(blobs, [delta.edge for _, delta in window if delta])
            finally:
                upcoming = await next_window
            yield window
            window = upcoming

    def _reset_deltas(self) -> None:
        if self._encoder:
            self._encoder.reset()

    async def commit(  # noqa: PLR0913 - by keyword
        self,
        job_id: str,
        version: int,
        *,
        expect: int,
        part_digests: Iterable[str],
        config_json: str,
        epoch: int | None = None,
        base_version: int | None = None,
        adapter_json: str = "",
        parity_json: str = "",
    ) -> VersionInfo:
        """Make published parts the new head if the head is `expect` (-1: none). Idempotent.

        Args:
            job_id: whose weights.
            version: above `expect`.
            expect: the version that must be the current head.
            part_digests: `Part.digest` of every rank, in rank order.
            config_json: the model's Hugging Face configuration.
            epoch: of the trainer's lease on the job, which it must still hold; None: not checked.
            base_version: for an adapter: the version of the model that it belongs to.
            adapter_json: for an adapter: PEFT's `adapter_config.json`.
            parity_json: `Manifest.parity_json`.

        Raises:
            Conflict: the head is another version, the parts do not cover whole tensors, the base is not retained, or
                another trainer holds the job.
            WaitTimedOut: the store was unavailable for too long.

        """
        request = CommitRequest(
            expect=expect,
            parts=tuple(part_digests),
            config_json=config_json,
            epoch=epoch,
            base_version=base_version,
            adapter_json=adapter_json,
            parity_json=parity_json,
        )
        with ExitStack() as on_error:
            # Workers hold committed versions only: deltas from an uncommitted one are useless.
            on_error.callback(self._reset_deltas)
            async with self._wait(f"commit version {version} of job {job_id}"):
                info = await retry_unavailable(lambda: self._client.commit(job_id, version, request))
            on_error.pop_all()
        return info

    async def head(self, job_id: str) -> VersionInfo | None:
        """Return the newest committed version, None before the first."""
        async with self._wait(f"head of job {job_id}"):
            return await retry_unavailable(lambda: self._client.head(job_id))

    async def pin(self, job_id: str, version: int) -> None:
        """Retain a committed version until it is unpinned, for example for a checkpoint."""
        async with self._wait(f"pin version {version} of job {job_id}"):
            await retry_unavailable(lambda: self._client.pin(job_id, version))

    def _wait(self, what: str, progress: Callable[[], str] = str) -> AbstractAsyncContextManager[None]:
        subject = f"the weight store at {self._client.url}"
        return self._waits.on(subject, because=what, limit_s=self._limit_s, progress=progress)

    async def _upload(self, blobs: list[_Blob], edges: Iterable[Edge] = ()) -> None:
        """Upload the blobs that the store lacks; chunks that `edges` lead to are derived by the store."""
        by_digest = {ref.digest: (ref, data) for ref, data in blobs}
        refs = [ref for ref, _ in by_digest.values()]
        if not refs:
            return
        missing = await retry_unavailable(lambda: self._client.missing(refs))
        applicable = [edge for edge in edges if edge.new in missing]
        await self._send(missing - {edge.new for edge in applicable}, by_digest)
        if applicable:
            refused = await retry_unavailable(lambda: self._client.apply(applicable)) & by_digest.keys()
            if refused:
                log.warning("deltas_refused", chunks=len(refused), reason="see delta_not_applied in the store's log")
            await self._send(refused, by_digest)

    async def _send(self, digests: Iterable[str], by_digest: Mapping[str, _Blob]) -> None:
        async def send(digest: str) -> None:
            ref, data = by_digest[digest]
            await retry_unavailable(lambda: self._client.put_chunk(ref, data))

        await for_each(digests, send, concurrency=_UPLOADS, name="weights-upload")


async def _next_window(updates: Iterator[_ChunkUpdate]) -> list[_ChunkUpdate]:
    """Return the next window, which a thread splits off.

    A thread cannot be cancelled: it must finish reading the shards before the caller may change them.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(list, itertools.islice(updates, _WINDOW)))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait({thread})
        raise


def _blobs(update: _ChunkUpdate) -> Iterator[_Blob]:
    chunk, delta = update
    yield chunk.ref, chunk.data
    if delta:
        yield delta.edge.blob, memoryview(delta.data)


def _with_deltas(chunks: Iterator[Chunk], encoder: DeltaEncoder | None) -> Iterator[_ChunkUpdate]:
    for index, chunk in enumerate(chunks):
        yield chunk, encoder.encode(index, chunk) if encoder else None


class DeltaEncoder:
    """Holds the bytes that one rank published last in host memory: at most one copy of its part."""

    def __init__(self) -> None:
        self._owner = ("", -1)
        self._version = -1
        self._digests: list[str] = []
        self._chunks: list[bytearray] = []

    def reset(self) -> None:
        """Drop the retained version: the next one is published without deltas."""
        self._owner, self._version = ("", -1), -1
        self._digests, self._chunks = [], []

    def begin(self, job_id: str, rank: int, version: int) -> int:
        """Start a version of this rank's part; return the older version that is retained, -1 for none."""
        if self._owner != (job_id, rank) or self._version >= version:
            self.reset()
            self._owner = job_id, rank
        return self._version

    def encode(self, index: int, chunk: Chunk) -> Delta | None:
        """Retain chunk `index` of the part; return the delta to it, None if it is too large. Call it in a thread."""
        if index >= len(self._chunks):
            self._digests.append(chunk.ref.digest)
            self._chunks.append(bytearray(chunk.data))
            return None
        base, old = self._digests[index], self._chunks[index]
        if base == chunk.ref.digest:
            return None
        delta = _delta(base, old, chunk) if len(old) == chunk.ref.n_bytes else None
        # In place if the size is equal: new pages would cost more than the copy.
        old[:] = chunk.data
        self._digests[index] = chunk.ref.digest
        return delta

    def end(self, version: int, n_chunks: int) -> None:
        """Finish the part: it is version `version` and has `n_chunks` chunks."""
        del self._digests[n_chunks:], self._chunks[n_chunks:]
        self._version = version


def _delta(base: str, old: bytearray, chunk: Chunk) -> Delta | None:
    if chunk.ref.n_bytes % ITEM_BYTES[chunk.dtype]:
        return None
    data = encode_delta(old, chunk.data, chunk.dtype)
    if 2 * len(data) > chunk.ref.n_bytes:
        return None
    return Delta(Edge(chunk.ref.digest, base, digest_of(data), len(data)), data)
