"""The edges between versions: taken from the publisher at a commit, joined to longer hops, dropped when they are old.

One loop, `compose`: consumes committed versions in order, and produces for each the hops of 2, 4 and 8 versions, and
to every eighth one from the job's first version, a hop at a time; it waits for nothing but the disk or the object
store, and ends at the stop, between two chunks. It works on one chunk at a time, in a thread. What it had not finished
when the process was killed it does again at the next start; a hop is visible whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import structlog

from services.weight_store.domain.edges import LONGEST_HOPS, Joint, Span, anchor, outdated, published, span, worth
from services.weight_store.domain.versions import Model
from services.weight_store.metrics import Metrics
from services.weight_store.ports import Chunks, Documents, StoreFull
from shared.errors import Bury, NotFound, StoreUnavailable, Undecodable
from shared.lifecycle import until_stop
from shared.weights import codec
from shared.weights.edges import MAX_DOCUMENTS, Edge, EdgeList, Route, VersionEdges
from shared.weights.manifest import Manifest, digest_of
from shared.weights.plan import next_stop

log = structlog.get_logger(__name__)

_RETRY_S = 1.0


class Survey(NamedTuple):
    """What of one job's deltas is needed and what is not."""

    referenced: set[str]
    """Deltas that stay."""
    dropped: dict[str, float]
    """Deltas that may go unless they were used after the time."""
    outdated: list[int]
    """Versions whose documents go once the deltas have gone."""


class _Commit(NamedTuple):
    job_id: str
    version: int
    base: int | None


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
        self._committed: asyncio.Queue[_Commit | None] = asyncio.Queue()

    async def record(self, job_id: str, version: int, manifest: Manifest) -> int | None:
        """Write down the publisher's edges, which count once the version is committed; return the deltas' bytes.

        None stands for a version that has no edges.

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
                return None
            hop = await self._present(hop)
            await self._write(job_id, version, (hop,))
            return sum(edge.n_bytes for edge in hop.edges)

    def committed(self, job_id: str, version: int, base: int | None) -> None:
        """Have the longer hops to a version composed, some time; `base` is the job's first version if it stays."""
        self._committed.put_nowait(_Commit(job_id, version, base))

    async def route(self, job_id: str, version: int, have: int, base: int | None) -> Route:
        """Return the edges that lead from version `have` to `version`, and those from the base if that is nearer."""
        documents = await self._walk(job_id, version, have)
        if base is not None and have <= base and (stop := anchor(version, base)) is not None:
            documents |= await self._walk(job_id, version, stop) | await self._walk(job_id, stop, stop - 1)
        return Route(documents=tuple(documents[at] for at in sorted(documents, reverse=True)))

    async def _walk(self, job_id: str, version: int, have: int) -> dict[int, VersionEdges]:
        """Return version -> document along the longest hops back to `have`, as far as there are any."""
        documents: dict[int, VersionEdges] = {}
        stop: int | None = version
        while stop is not None and len(documents) < MAX_DOCUMENTS // 4:
            try:
                documents[stop] = await self.document(job_id, stop)
            except NotFound:
                break
            stop = next_stop(documents[stop], have)
        return documents

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
            while (commit := await self._committed.get()) is not None:
                while not stop.is_set() and not await self._composed_to(commit, stop):
                    await until_stop(stop, _RETRY_S)
        finally:
            ending.cancel()

    async def _composed_to(self, commit: _Commit, stop: asyncio.Event) -> bool:
        """Compose what can be; tell whether that was all, or the object store is away."""
        job_id, version, _ = commit
        try:
            await self._extend(commit, stop)
        except NotFound:
            pass  # One of the versions has gone meanwhile, or has no edges.
        except StoreUnavailable as error:
            log.warning("deltas_put_off", job=job_id, version=version, error=str(error))
            return False
        except (Bury, StoreFull) as error:
            log.warning("deltas_not_composed", job=job_id, version=version, error=str(error))
        return True

    async def _extend(self, commit: _Commit, stop: asyncio.Event) -> None:
        job_id, version, base = commit
        document = await self.document(job_id, version)
        manifest = await asyncio.to_thread(Manifest.decode, await self._documents.manifest(job_id, version))
        sizes = {chunk.digest: chunk.n_bytes for chunk in manifest.chunks()}
        while len(document.hops) < LONGEST_HOPS:
            last = document.hops[-1]
            before = (await self.document(job_id, last.base)).hops
            if len(before) < len(document.hops):
                return
            hop = await self._hop(span(before[len(document.hops) - 1], last, sizes.keys()), sizes, stop)
            if hop is None:
                return
            document = await self._add(job_id, document.model_copy(update={"hops": (*document.hops, hop)}), hop)
        last = document.hops[-1]
        if base is None or anchor(version, base) != version or document.hop_from(base) is not None:
            return
        first = (await self.document(job_id, last.base)).hop_from(base)
        hop = await self._hop(span(first, last, sizes.keys()), sizes, stop) if first is not None else None
        if hop is not None:
            await self._add(job_id, document.model_copy(update={"from_base": hop}), hop)

    async def _add(self, job_id: str, document: VersionEdges, hop: EdgeList) -> VersionEdges:
        """Write a document that has a new hop."""
        async with self._changing[job_id]:
            # Somebody may have found the version outdated while its chunks were composed.
            await self._documents.edges(job_id, document.version)
            await self._write(job_id, document.version, document.hops, document.from_base)
        log.info("deltas_composed", job=job_id, version=document.version, base=hop.base, n_edges=len(hop.edges))
        return document

    async def _hop(self, joined: Span, sizes: dict[str, int], stop: asyncio.Event) -> EdgeList | None:
        edges = list(joined.copies)
        for joint in joined.joints:
            if stop.is_set():
                return None
            edge = await self._edge(joint, sizes.get(joint.second.new, 0))
            if edge is not None:
                edges.append(edge)
        return await self._present(EdgeList(base=joined.base, edges=tuple(edges)))

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

    async def _write(
        self, job_id: str, version: int, hops: tuple[EdgeList, ...], from_base: EdgeList | None = None
    ) -> None:
        document = VersionEdges(version=version, at=self._now(), hops=hops, from_base=from_base)
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
