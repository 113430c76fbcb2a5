"""The delta graph of every job: apply uploaded deltas, record edges at a commit, compose longer hops, drop old ones.

One loop, `compose`, consumes committed versions in order. It produces the files of the chunks that deltas lead to (see
`derived_chunks`) and, one hop at a time, the hops over 2, 4 and 8 versions and, to every eighth version, the hop from
the job's first version. It waits for the next commit and for the disk or object store, and ends at the stop, between
two chunks. It composes one chunk at a time, in a thread. After a crash the next process composes the missing hops; a
hop is visible completely or not at all.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import NamedTuple

import structlog

from rlboost.services.weight_store.derived_chunks import DerivedChunks
from rlboost.services.weight_store.domain.delta_graph import (
    LONGEST_HOPS,
    EdgePair,
    HopPlan,
    is_worthwhile,
    merge_uploaded,
    nearest_from_base,
    outdated,
    span,
)
from rlboost.services.weight_store.domain.versions import Model
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import Documents, StoreFull
from rlboost.shared.errors import NotFound, StoreUnavailable, Undecodable, Unprocessable
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.weights import codec
from rlboost.shared.weights.delta_graph import MAX_DOCUMENTS, Edge, EdgeList, Route, VersionEdges
from rlboost.shared.weights.manifest import Manifest, digest_of
from rlboost.shared.weights.parallel import for_each
from rlboost.shared.weights.plan import next_stop

log = structlog.get_logger(__name__)

_RETRY_S = 1.0
WRITE_INTERVAL_S = 60.0
"""How often derived chunks are written without a commit, after there was no space for them."""
_MAX_CONCURRENT = 4
"""Deltas applied concurrently."""


class Survey(NamedTuple):
    """Which deltas of one job are referenced and which may be removed."""

    referenced: set[str]
    """Deltas to retain."""
    dropped: dict[str, float]
    """Delta -> time; it may be removed unless it was used after that time."""
    outdated: list[int]
    """Versions whose documents are removed after their deltas."""


class _Commit(NamedTuple):
    job_id: str
    version: int
    base: int | None


class Deltas:
    """The delta graphs of one store."""

    def __init__(
        self, chunks: DerivedChunks, documents: Documents, metrics: Metrics, *, keep: int, clock: Callable[[], float]
    ) -> None:
        """Use the store's ports; edges of the `keep` newest versions of each job are retained."""
        self._chunks = chunks
        self._documents = documents
        self._metrics = metrics
        self._keep = keep
        self._clock = clock
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By job: held while a document is replaced or surveyed."""
        self._composable: asyncio.Queue[_Commit | None] = asyncio.Queue()

    async def restore(self, model: Model, held: Container[str]) -> None:
        """Find the chunks of committed versions that an earlier process derived and did not write.

        Args:
            model: the job's versions.
            held: the digests of all chunks in the store.

        """
        lacking: dict[str, tuple[int, float]] = {}
        for version in model.versions:
            try:
                manifest = await self._documents.manifest(model.job_id, version.version)
                chunks = (await asyncio.to_thread(Manifest.decode, manifest)).chunks()
            except (NotFound, Undecodable):
                continue  # the readers of this version, and the collection, report it
            for chunk in chunks:
                if chunk.digest not in held:
                    lacking[chunk.digest] = chunk.n_bytes, version.committed_at
        versions = await self._documents.edge_versions(model.job_id) if lacking else []
        for number in reversed(versions):
            with suppress(NotFound):
                for edge in (await self.document(model.job_id, number)).hops[0].edges:
                    if edge.new in lacking and edge.base in held and edge.delta in held:
                        self._chunks.add(edge, *lacking.pop(edge.new))
        if lacking:
            log.error("chunks_lost", job=model.job_id, chunks=len(lacking))

    async def apply(self, edges: Sequence[Edge]) -> list[str]:
        """Derive the chunks that these edges lead to; return the digests of those that cannot be derived.

        Raises:
            StoreFull: the disk is full.

        """
        failed: list[str] = []

        async def apply(edge: Edge) -> None:
            try:
                await self._chunks.derive(edge, self._now())
            except (NotFound, Unprocessable) as error:
                log.warning("delta_not_applied", chunk=edge.new, base=edge.base, error=str(error))
                failed.append(edge.new)
            else:
                self._metrics.deltas_applied.inc()

        await for_each(edges, apply, concurrency=_MAX_CONCURRENT, name="deltas-apply")
        return failed

    async def uploaded_hop(self, version: int, manifest: Manifest) -> EdgeList | None:
        """Return the edges that a version's publisher uploaded and whose deltas are there, None for a version without.

        Raises:
            Undecodable: an edge list is invalid.

        """
        lists = [
            EdgeList.decode(data)
            for part in manifest.parts
            for ref in part.edges
            if (data := await self._read(ref.digest)) is not None
        ]
        hop = merge_uploaded(version, lists, {chunk.digest: chunk.n_bytes for chunk in manifest.chunks()})
        return await self._present(hop) if hop else None

    async def write_hop(self, job_id: str, version: int, hop: EdgeList | None) -> int | None:
        """Write what `uploaded_hop` returned, to be visible with the commit; return the total bytes of the deltas.

        Raises:
            StoreFull: the disk is full.

        """
        async with self._locks[job_id]:
            if hop is None:
                await self._documents.remove_edges(job_id, version)
                return None
            await self._write(job_id, version, (hop,))
            return sum(edge.n_bytes for edge in hop.edges)

    def queue_composition(self, job_id: str, version: int, base: int | None) -> None:
        """Queue the composition of longer hops to a version; `base` is the job's first version if it is pinned."""
        self._composable.put_nowait(_Commit(job_id, version, base))

    async def route(self, job_id: str, version: int, have: int, base: int | None) -> Route:
        """Return the edges from version `have` to `version`, and from the base if `have` is not newer than it."""
        documents = await self._walk(job_id, version, have)
        if base is not None and have <= base and (stop := nearest_from_base(version, base)) is not None:
            documents |= await self._walk(job_id, version, stop) | await self._walk(job_id, stop, stop - 1)
        return Route(documents=tuple(documents[at] for at in sorted(documents, reverse=True)))

    async def _walk(self, job_id: str, version: int, have: int) -> dict[int, VersionEdges]:
        """Return version -> document along the longest hops back to `have`, as far as they exist."""
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
        """Return the edges to a version; raises `NotFound`, also for a corrupt document."""
        data = await self._documents.edges(job_id, version)
        try:
            return await asyncio.to_thread(VersionEdges.decode, data)
        except Undecodable as error:
            log.warning("edges_corrupt", job=job_id, version=version, error=str(error))
            raise NotFound(f"the edges to version {version} of job {job_id} cannot be read") from error

    async def survey(self, model: Model) -> Survey:
        """Return which deltas of a job are referenced and which may be removed."""
        result, inputs = Survey(set(), {}, []), self._chunks.inputs()
        async with self._locks[model.job_id]:
            versions = await self._documents.edge_versions(model.job_id)
            old = set(outdated(versions, model.head, keep=self._keep))
            for version in versions:
                deltas, at = await self._deltas_of(model, version)
                if version in old and deltas.isdisjoint(inputs):
                    result.outdated.append(version)
                    result.dropped.update(dict.fromkeys(deltas, at))
                else:
                    result.referenced.update(deltas)
        return result

    async def _deltas_of(self, model: Model, version: int) -> tuple[set[str], float]:
        """Return the deltas of a document and its time; none of one that is not committed or cannot be read."""
        if version > model.head:
            return set(), 0.0
        try:
            document = await self.document(model.job_id, version)
        except NotFound:
            return set(), 0.0
        return {edge.delta for edge in document.edges()}, document.at

    async def forget(self, job_id: str, versions: list[int]) -> None:
        """Remove the edges to these versions."""
        for version in versions:
            await self._documents.remove_edges(job_id, version)

    async def compose(self, stop: asyncio.Event) -> None:
        """Write the derived chunks of every committed version and compose longer hops to it, until the stop."""

        async def end() -> None:
            await stop.wait()
            self._composable.put_nowait(None)

        ending = asyncio.create_task(end(), name="compose-end")
        try:
            while not stop.is_set():
                commit = None
                with suppress(TimeoutError):  # write the chunks for which there was no space
                    commit = await asyncio.wait_for(self._composable.get(), WRITE_INTERVAL_S)
                while not stop.is_set() and not await self._compose_commit(commit, stop):
                    await until_stop(stop, _RETRY_S)
        finally:
            ending.cancel()

    async def _write_chunks(self, stop: asyncio.Event) -> None:
        try:
            await self._chunks.write_all(stop)
        except StoreFull as error:
            log.warning("derived_chunks_not_written", chunks=len(self._chunks), error=str(error))

    async def _compose_commit(self, commit: _Commit | None, stop: asyncio.Event) -> bool:
        """Write derived chunks, and compose what a version needs; return False if the object store was unavailable."""
        job_id, version = (commit.job_id, commit.version) if commit else (None, None)
        try:
            await self._write_chunks(stop)
            if commit is not None:
                await self._extend(commit, stop)
        except NotFound:
            pass  # a version was removed meanwhile, or has no edges
        except StoreUnavailable as error:
            log.warning("deltas_deferred", job=job_id, version=version, error=str(error))
            return False
        except (Unprocessable, StoreFull) as error:
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
        if base is None or nearest_from_base(version, base) != version or document.hop_from(base) is not None:
            return
        first = (await self.document(job_id, last.base)).hop_from(base)
        hop = await self._hop(span(first, last, sizes.keys()), sizes, stop) if first is not None else None
        if hop is not None:
            await self._add(job_id, document.model_copy(update={"from_base": hop}), hop)

    async def _add(self, job_id: str, document: VersionEdges, hop: EdgeList) -> VersionEdges:
        """Write a document with a new hop."""
        async with self._locks[job_id]:
            # Raises NotFound if the version became outdated while its chunks were composed.
            await self._documents.edges(job_id, document.version)
            await self._write(job_id, document.version, document.hops, document.from_base)
        log.info("deltas_composed", job=job_id, version=document.version, base=hop.base, n_edges=len(hop.edges))
        return document

    async def _hop(self, joined: HopPlan, sizes: dict[str, int], stop: asyncio.Event) -> EdgeList | None:
        edges = list(joined.copies)
        for pair in joined.pairs:
            if stop.is_set():
                return None
            edge = await self._edge(pair, sizes.get(pair.second.new, 0))
            if edge is not None:
                edges.append(edge)
        return await self._present(EdgeList(base=joined.base, edges=tuple(edges)))

    async def _edge(self, pair: EdgePair, chunk_bytes: int) -> Edge | None:
        first, second = await self._read(pair.first.delta), await self._read(pair.second.delta)
        if first is None or second is None:
            return None
        data = await asyncio.to_thread(_composed, first, second, pair.second.new)
        if data is None or not is_worthwhile(len(data), pair, chunk_bytes):
            return None
        edge = Edge(pair.second.new, pair.first.base, await asyncio.to_thread(digest_of, data), len(data))
        await self._chunks.put(edge.delta, [data], self._now())
        self._metrics.deltas_composed.inc()
        return edge

    async def _present(self, hop: EdgeList) -> EdgeList:
        """Return the hop without the edges whose delta is missing; mark the others as used."""
        missing = set(await self._chunks.missing([edge.blob for edge in hop.edges], self._now()))
        return hop.model_copy(update={"edges": tuple(edge for edge in hop.edges if edge.delta not in missing)})

    async def _write(
        self, job_id: str, version: int, hops: tuple[EdgeList, ...], from_base: EdgeList | None = None
    ) -> None:
        document = VersionEdges(version=version, at=self._now(), hops=hops, from_base=from_base)
        await self._documents.put_edges(job_id, version, await asyncio.to_thread(document.encode))

    async def _read(self, digest: str) -> bytes | None:
        """Return a chunk's bytes, None if it is missing or corrupt."""
        try:
            data = await self._chunks.read(digest)
        except NotFound:
            return None
        if await asyncio.to_thread(digest_of, data) != digest:
            log.warning("chunk_corrupt", digest=digest)
            return None
        return data

    def _now(self) -> float:
        return round(self._clock(), 6)


def _composed(first: bytes, second: bytes, digest: str) -> bytes | None:
    """Return the composition of two deltas to a chunk, None if there is none.

    It is exact, since both were verified, and is not applied here: a worker that applies it checks the chunk's digest.
    """
    try:
        return codec.compose(first, second)
    except Unprocessable as error:
        log.warning("delta_not_composable", chunk=digest, error=str(error))
        return None
