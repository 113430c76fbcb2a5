"""The edges between versions: taken from the publisher at a commit, joined to longer hops, dropped when they are old.

One loop, `compose`: consumes committed versions in order, and produces for each the hops of 2, 4 and 8 versions, a
hop at a time; it waits for nothing but the disk, and ends at the stop, between two chunks. It works on one chunk at a
time, in a thread. What it had not finished when the process was killed it does again at the next start; a hop is
visible whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import structlog

from services.weight_store.domain.edges import LONGEST_HOPS, Joint, Span, outdated, published, span, worth
from services.weight_store.domain.versions import Model
from services.weight_store.metrics import Metrics
from services.weight_store.ports import Chunks, Documents, StoreFull
from shared.errors import Bury, NotFound, Undecodable
from shared.weights import codec
from shared.weights.edges import Edge, EdgeList, VersionEdges
from shared.weights.manifest import Manifest, digest_of

log = structlog.get_logger(__name__)


class Survey(NamedTuple):
    """What of one job's deltas is needed and what is not."""

    referenced: set[str]
    """Deltas that stay."""
    dropped: dict[str, float]
    """Deltas that may go unless they were used after the time."""
    outdated: list[int]
    """Versions whose documents go once the deltas have gone."""


class Deltas:
    """All edges of one store."""

    def __init__(
        self, chunks: Chunks, documents: Documents, metrics: Metrics, *, keep: int, clock: Callable[[], float]
    ) -> None:
        """Use the store's ports; `keep` is of how many newest versions the edges stay."""
        self._chunks = chunks
        self._documents = documents
        self._metrics = metrics
        self._keep = keep
        self._clock = clock
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By job: held while a document is replaced or found outdated."""
        self._committed: asyncio.Queue[tuple[str, int] | None] = asyncio.Queue()

    async def record(self, job_id: str, version: int, manifest: Manifest) -> None:
        """Write down the publisher's edges. They count once the version is committed.

        Raises:
            Undecodable: an edge list is not one.
            StoreFull: there is no room.

        """
        lists = [
            EdgeList.decode(data)
            for part in manifest.parts
            for ref in part.edges
            if (data := await self._read(ref.digest)) is not None
        ]
        hop = published(version, lists, {chunk.digest: chunk.n_bytes for chunk in manifest.chunks()})
        async with self._changing[job_id]:
            if hop is None:
                await self._documents.remove_edges(job_id, version)
            else:
                await self._write(job_id, version, (await self._present(hop),))

    def committed(self, job_id: str, version: int) -> None:
        """Have the longer hops to a version composed, some time."""
        self._committed.put_nowait((job_id, version))

    async def document(self, job_id: str, version: int) -> VersionEdges:
        """Return the edges to a version, raising `NotFound`; a document that has rotted counts as none."""
        data = await self._documents.edges(job_id, version)
        try:
            return await asyncio.to_thread(VersionEdges.decode, data)
        except Undecodable as error:
            log.warning("edges_rotten", job=job_id, version=version, error=str(error))
            raise NotFound(f"the edges to version {version} of job {job_id} cannot be read") from error

    async def survey(self, model: Model) -> Survey:
        """Tell which deltas of a job are needed."""
        result = Survey(set(), {}, [])
        async with self._changing[model.job_id]:
            versions = await self._documents.edge_versions(model.job_id)
            result.outdated.extend(outdated(versions, model.head, keep=self._keep))
            for version in versions:
                if version > model.head:
                    continue
                try:
                    document = await self.document(model.job_id, version)
                except NotFound:
                    continue
                deltas = {edge.delta for edge in document.edges()}
                if version in result.outdated:
                    result.dropped.update(dict.fromkeys(deltas, document.at))
                else:
                    result.referenced.update(deltas)
        return result

    async def forget(self, job_id: str, versions: list[int]) -> None:
        """Remove the edges to these versions."""
        for version in versions:
            await self._documents.remove_edges(job_id, version)

    async def compose(self, stop: asyncio.Event) -> None:
        """Compose longer hops to every version that is committed."""

        async def end() -> None:
            await stop.wait()
            self._committed.put_nowait(None)

        ending = asyncio.create_task(end(), name="compose-end")
        try:
            while (commit := await self._committed.get()) is not None and not stop.is_set():
                try:
                    await self._extend(*commit, stop)
                except NotFound:
                    continue  # One of the versions has gone meanwhile, or has no edges.
                except (Bury, StoreFull) as error:
                    log.warning("deltas_not_composed", job=commit[0], version=commit[1], error=str(error))
        finally:
            ending.cancel()

    async def _extend(self, job_id: str, version: int, stop: asyncio.Event) -> None:
        hops = list((await self.document(job_id, version)).hops)
        manifest = await asyncio.to_thread(Manifest.decode, await self._documents.manifest(job_id, version))
        sizes = {chunk.digest: chunk.n_bytes for chunk in manifest.chunks()}
        while len(hops) < LONGEST_HOPS:
            before = (await self.document(job_id, hops[-1].base)).hops
            if len(before) < len(hops):
                return
            joined = span(before[len(hops) - 1], hops[-1], sizes.keys())
            hop = await self._hop(joined, sizes, stop)
            if hop is None:
                return
            async with self._changing[job_id]:
                # Somebody may have found the version outdated while its chunks were composed.
                await self._documents.edges(job_id, version)
                hops.append(await self._present(hop))
                await self._write(job_id, version, tuple(hops))
            log.info("deltas_composed", job=job_id, version=version, base=hop.base, n_edges=len(hop.edges))

    async def _hop(self, joined: Span, sizes: dict[str, int], stop: asyncio.Event) -> EdgeList | None:
        edges = list(joined.copies)
        for joint in joined.joints:
            if stop.is_set():
                return None
            edge = await self._edge(joint, sizes.get(joint.second.new, 0))
            if edge is not None:
                edges.append(edge)
        return EdgeList(base=joined.base, edges=tuple(edges))

    async def _edge(self, joint: Joint, chunk_bytes: int) -> Edge | None:
        first, second = await self._read(joint.first.delta), await self._read(joint.second.delta)
        if first is None or second is None:
            return None
        base = await self._read(joint.first.base)
        data = await asyncio.to_thread(_composed, first, second, base, joint.second.new)
        if data is None or not worth(len(data), joint, chunk_bytes):
            return None
        edge = Edge(joint.second.new, joint.first.base, await asyncio.to_thread(digest_of, data), len(data))
        await self._chunks.put(edge.delta, [data], self._now())
        self._metrics.deltas_composed.inc()
        return edge

    async def _present(self, hop: EdgeList) -> EdgeList:
        """Return the hop without the edges whose delta is not there; the others are marked as used."""
        lacking = set(await self._chunks.missing([edge.blob for edge in hop.edges], self._now()))
        return hop.model_copy(update={"edges": tuple(edge for edge in hop.edges if edge.delta not in lacking)})

    async def _write(self, job_id: str, version: int, hops: tuple[EdgeList, ...]) -> None:
        document = VersionEdges(version=version, at=self._now(), hops=hops)
        await self._documents.put_edges(job_id, version, await asyncio.to_thread(document.encode))

    async def _read(self, digest: str) -> bytes | None:
        """Return a chunk's bytes, None when it is gone or has rotted."""
        try:
            data = await self._chunks.read(digest)
        except NotFound:
            return None
        if await asyncio.to_thread(digest_of, data) != digest:
            log.warning("chunk_rotten", digest=digest)
            return None
        return data

    def _now(self) -> float:
        return round(self._clock(), 6)


def _composed(first: bytes, second: bytes, base: bytes | None, digest: str) -> bytes | None:
    """Return the delta that does what two do, None where there is none.

    Where the store still has the base, the delta is tried on it. Where it has not, composing two verified deltas is
    exact by construction, and whoever applies the result compares the digest.
    """
    try:
        data = codec.compose(first, second, base)
        if base is not None and digest_of(codec.apply(base, data)) != digest:
            log.warning("composed_delta_wrong", digest=digest)
            return None
    except Bury as error:
        log.warning("delta_not_composable", digest=digest, error=str(error))
        return None
    return data
