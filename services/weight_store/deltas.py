"""The delta graph of every job: apply uploaded deltas, record edges at a commit, find routes, drop old edges.

The words are defined in `shared.weights.delta_graph`. `DeltaComposer` adds longer hops to those that are uploaded.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import structlog

from rlboost.services.weight_store.chunks import DerivedChunks
from rlboost.services.weight_store.domain.versions import (
    HOPS_BY_SPAN,
    EdgePair,
    JobVersions,
    is_worthwhile,
    join_hops,
    merge_uploaded,
    nearest_from_base,
    outdated,
)
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import Documents, StoreFull
from rlboost.shared.errors import NotFound, StoreUnavailable, Undecodable, Unprocessable
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.process.waiting import for_each
from rlboost.shared.weights.delta import compose_deltas
from rlboost.shared.weights.delta_graph import MAX_DOCUMENTS, Edge, EdgeList, Route, VersionEdges, next_stop
from rlboost.shared.weights.manifest import Manifest, digest_of

log = structlog.get_logger(__name__)

_MAX_CONCURRENT = 4
"""Deltas applied concurrently."""


class Survey(NamedTuple):
    """Which deltas of one job are referenced and which may be removed."""

    referenced: set[str]
    """Deltas to retain."""
    dropped: dict[str, float]
    """Delta -> time; it may be removed unless it was used after that time."""
    outdated: list[int]
    """Versions whose edges are removed after their deltas."""


class CommittedVersion(NamedTuple):
    """A version to which longer hops may be composed."""

    job_id: str
    version: int
    base: int | None
    """The job's first version, if it is pinned."""


class Deltas:
    """The edges to the versions of every job."""

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
        """Job -> lock that is held while the job's edges are replaced or surveyed."""
        self.to_compose: asyncio.Queue[CommittedVersion | None] = asyncio.Queue()
        """Read by the composer, which queues None at the stop to wake itself."""

    async def restore(self, job: JobVersions, held: Container[str]) -> None:
        """Find the chunks of committed versions that an earlier process derived and did not write.

        Args:
            job: the job's versions.
            held: the digests of all chunks in the store.

        """
        lost: dict[str, tuple[int, float]] = {}
        for version in job.versions:
            try:
                manifest = await self._documents.manifest(job.job_id, version.version)
                chunks = (await asyncio.to_thread(Manifest.decode, manifest)).chunks()
            except (NotFound, Undecodable):
                continue  # the readers of this version, and the collection, report it
            for chunk in chunks:
                if chunk.digest not in held:
                    lost[chunk.digest] = chunk.n_bytes, version.committed_at
        versions = await self._documents.edge_versions(job.job_id) if lost else []
        for number in reversed(versions):
            with suppress(NotFound):
                for edge in (await self.edges_to(job.job_id, number)).hops[0].edges:
                    if edge.new in lost and edge.base in held and edge.delta in held:
                        self._chunks.add(edge, *lost.pop(edge.new))
        if lost:
            log.error("chunks_lost", job=job.job_id, chunks=len(lost))

    async def apply(self, edges: Sequence[Edge]) -> list[str]:
        """Derive the chunks that these edges lead to; return the digests of those that cannot be derived.

        Raises:
            StoreFull: the disk is full.

        """
        failed: list[str] = []

        async def apply(edge: Edge) -> None:
            try:
                await self._chunks.derive(edge, self._clock())
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
            if (data := await self.read(ref.digest)) is not None
        ]
        hop = merge_uploaded(version, lists, {chunk.digest: chunk.n_bytes for chunk in manifest.chunks()})
        return await self.present(hop) if hop else None

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

    async def extend(self, job_id: str, edges: VersionEdges) -> None:
        """Write the edges to a version with one more hop; raises `NotFound` if they were dropped meanwhile."""
        async with self._locks[job_id]:
            await self._documents.edges(job_id, edges.version)
            await self._write(job_id, edges.version, edges.hops, edges.from_base)

    async def _write(
        self, job_id: str, version: int, hops: tuple[EdgeList, ...], from_base: EdgeList | None = None
    ) -> None:
        edges = VersionEdges(version=version, at=self._clock(), hops=hops, from_base=from_base)
        await self._documents.put_edges(job_id, version, await asyncio.to_thread(edges.encode))

    def queue_composition(self, job_id: str, version: int, base: int | None) -> None:
        """Queue the composition of longer hops to a version; `base` is the job's first version if it is pinned."""
        self.to_compose.put_nowait(CommittedVersion(job_id, version, base))

    async def route(self, job_id: str, version: int, have: int, base: int | None) -> Route:
        """Return the edges from version `have` to `version`, and from the base if `have` is not newer than it."""
        stops = await self._walk(job_id, version, have)
        if base is not None and have <= base and (near := nearest_from_base(version, base)) is not None:
            stops |= await self._walk(job_id, version, near) | await self._walk(job_id, near, near - 1)
        return Route(documents=tuple(stops[at] for at in sorted(stops, reverse=True)))

    async def _walk(self, job_id: str, version: int, have: int) -> dict[int, VersionEdges]:
        """Return the edges to each stop along the longest hops back to `have`, as far as they exist."""
        stops: dict[int, VersionEdges] = {}
        stop: int | None = version
        while stop is not None and len(stops) < MAX_DOCUMENTS // 4:
            try:
                stops[stop] = await self.edges_to(job_id, stop)
            except NotFound:
                break
            stop = next_stop(stops[stop], have)
        return stops

    async def edges_to(self, job_id: str, version: int) -> VersionEdges:
        """Return the edges to a version; raises `NotFound`, also if they are corrupt."""
        data = await self._documents.edges(job_id, version)
        try:
            return await asyncio.to_thread(VersionEdges.decode, data)
        except Undecodable as error:
            log.warning("edges_corrupt", job=job_id, version=version, error=str(error))
            raise NotFound(f"the edges to version {version} of job {job_id} cannot be read") from error

    async def survey(self, job: JobVersions) -> Survey:
        """Return which deltas of a job are referenced and which may be removed."""
        result, inputs = Survey(set(), {}, []), self._chunks.inputs()
        async with self._locks[job.job_id]:
            versions = await self._documents.edge_versions(job.job_id)
            old = set(outdated(versions, job.head, keep=self._keep))
            for version in versions:
                deltas, at = await self._deltas_of(job, version)
                if version in old and deltas.isdisjoint(inputs):
                    result.outdated.append(version)
                    result.dropped.update(dict.fromkeys(deltas, at))
                else:
                    result.referenced.update(deltas)
        return result

    async def _deltas_of(self, job: JobVersions, version: int) -> tuple[set[str], float]:
        """Return the deltas that lead to a version, and their time; none if it is not committed or they are corrupt."""
        if version > job.head:
            return set(), 0.0
        try:
            found = await self.edges_to(job.job_id, version)
        except NotFound:
            return set(), 0.0
        return {edge.delta for edge in found.edges()}, found.at

    async def forget(self, job_id: str, versions: list[int]) -> None:
        """Remove the edges to these versions."""
        for version in versions:
            await self._documents.remove_edges(job_id, version)

    async def present(self, hop: EdgeList) -> EdgeList:
        """Return a hop without the edges whose delta is missing; mark the others as used."""
        missing = set(await self._chunks.missing([edge.blob for edge in hop.edges], self._clock()))
        return hop.model_copy(update={"edges": tuple(edge for edge in hop.edges if edge.delta not in missing)})

    async def read(self, digest: str) -> bytes | None:
        """Return the bytes of a delta or of an uploaded list, None if it is missing or corrupt."""
        try:
            data = await self._chunks.read(digest)
        except NotFound:
            return None
        if await asyncio.to_thread(digest_of, data) != digest:
            log.warning("chunk_corrupt", digest=digest)
            return None
        return data


# --- Composes longer hops after each commit, and writes the files of derived chunks -----------------------------------
# One loop, `compose`, consumes committed versions in order. It produces the files of the chunks that deltas lead to
# (see `DerivedChunks`) and, one hop at a time, the hops over 2, 4 and 8 versions and, to every eighth version, the hop
# from the job's first version. It waits for the next commit and for the disk or object store, and ends at the stop,
# between two chunks. It composes one chunk at a time, in a thread. After a crash the next process composes the missing
# hops; a hop is visible completely or not at all.


_RETRY_S = 1.0
WRITE_INTERVAL_S = 60.0
"""How often derived chunks are written without a commit, after there was no space for them."""


class DeltaComposer:
    """Composes hops to the committed versions of one store."""

    def __init__(
        self,
        deltas: Deltas,
        chunks: DerivedChunks,
        documents: Documents,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
    ) -> None:
        """Read and extend `deltas`; `clock` returns Unix seconds, rounded to microseconds."""
        self._deltas = deltas
        self._chunks = chunks
        self._documents = documents
        self._metrics = metrics
        self._clock = clock

    async def compose(self, stop: asyncio.Event) -> None:
        """Write the derived chunks of every committed version and compose longer hops to it, until the stop."""

        async def wake() -> None:
            await stop.wait()
            self._deltas.to_compose.put_nowait(None)

        waking = asyncio.create_task(wake(), name="compose-end")
        try:
            while not stop.is_set():
                commit = await self._next_commit()
                while not stop.is_set() and not await self._compose_for(commit, stop):
                    await until_stop(stop, _RETRY_S)
        finally:
            waking.cancel()

    async def _next_commit(self) -> CommittedVersion | None:
        """Return the next commit; None at the stop, or after a time without one."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._deltas.to_compose.get(), WRITE_INTERVAL_S)
        return None

    async def _compose_for(self, commit: CommittedVersion | None, stop: asyncio.Event) -> bool:
        """Write derived chunks, and compose what a version needs; return False if the object store was unavailable."""
        job_id, version = (commit.job_id, commit.version) if commit else (None, None)
        try:
            await self._write_chunks(stop)
            if commit is not None:
                await self._add_hops(commit, stop)
        except NotFound:
            pass  # a version was removed meanwhile, or has no edges
        except StoreUnavailable as error:
            log.warning("deltas_deferred", job=job_id, version=version, error=str(error))
            return False
        except (Unprocessable, StoreFull) as error:
            log.warning("deltas_not_composed", job=job_id, version=version, error=str(error))
        return True

    async def _write_chunks(self, stop: asyncio.Event) -> None:
        try:
            await self._chunks.write_all(stop)
        except StoreFull as error:
            log.warning("derived_chunks_not_written", chunks=len(self._chunks), error=str(error))

    async def _add_hops(self, commit: CommittedVersion, stop: asyncio.Event) -> None:
        """Compose each longer hop to a version from the two halves that exist."""
        job_id, version, base = commit
        edges = await self._deltas.edges_to(job_id, version)
        manifest = await asyncio.to_thread(Manifest.decode, await self._documents.manifest(job_id, version))
        sizes = {chunk.digest: chunk.n_bytes for chunk in manifest.chunks()}
        while len(edges.hops) < HOPS_BY_SPAN:
            later = edges.hops[-1]
            halves = (await self._deltas.edges_to(job_id, later.base)).hops
            if len(halves) < len(edges.hops):
                return
            hop = await self._join(halves[len(edges.hops) - 1], later, sizes, stop)
            if hop is None:
                return
            edges = edges.model_copy(update={"hops": (*edges.hops, hop)})
            await self._record(job_id, edges, hop)
        if base is None or nearest_from_base(version, base) != version or edges.hop_from(base) is not None:
            return
        later = edges.hops[-1]
        earlier = (await self._deltas.edges_to(job_id, later.base)).hop_from(base)
        hop = await self._join(earlier, later, sizes, stop) if earlier is not None else None
        if hop is not None:
            await self._record(job_id, edges.model_copy(update={"from_base": hop}), hop)

    async def _record(self, job_id: str, edges: VersionEdges, hop: EdgeList) -> None:
        await self._deltas.extend(job_id, edges)
        log.info("deltas_composed", job=job_id, version=edges.version, base=hop.base, n_edges=len(hop.edges))

    async def _join(
        self, earlier: EdgeList, later: EdgeList, sizes: Mapping[str, int], stop: asyncio.Event
    ) -> EdgeList | None:
        """Return the hop over two consecutive ones, None at the stop; `sizes` has the chunks that it leads to."""
        joined = join_hops(earlier, later, sizes.keys())
        edges = list(joined.copies)
        for pair in joined.pairs:
            if stop.is_set():
                return None
            edge = await self._compose_edge(pair, sizes.get(pair.second.new, 0))
            if edge is not None:
                edges.append(edge)
        return await self._deltas.present(EdgeList(base=joined.base, edges=tuple(edges)))

    async def _compose_edge(self, pair: EdgePair, chunk_bytes: int) -> Edge | None:
        first, second = await self._deltas.read(pair.first.delta), await self._deltas.read(pair.second.delta)
        if first is None or second is None:
            return None
        data = await asyncio.to_thread(_composed, first, second, pair.second.new)
        if data is None or not is_worthwhile(len(data), pair, chunk_bytes):
            return None
        edge = Edge(pair.second.new, pair.first.base, await asyncio.to_thread(digest_of, data), len(data))
        await self._chunks.put(edge.delta, [data], self._clock())
        self._metrics.deltas_composed.inc()
        return edge


def _composed(first: bytes, second: bytes, digest: str) -> bytes | None:
    """Return the composition of two deltas to a chunk, None if there is none.

    It is exact, since both were verified, and is not applied here: a worker that applies it checks the chunk's digest.
    """
    try:
        return compose_deltas(first, second)
    except Unprocessable as error:
        log.warning("delta_not_composable", chunk=digest, error=str(error))
        return None
