"""Composes longer hops after each commit, and writes the files of derived chunks.

One loop, `compose`, consumes committed versions in order. It produces the files of the chunks that deltas lead to (see
`derived_chunks`) and, one hop at a time, the hops over 2, 4 and 8 versions and, to every eighth version, the hop from
the job's first version. It waits for the next commit and for the disk or object store, and ends at the stop, between
two chunks. It composes one chunk at a time, in a thread. After a crash the next process composes the missing hops; a
hop is visible completely or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from rlboost.services.weight_store.deltas.derived_chunks import DerivedChunks
from rlboost.services.weight_store.deltas.edges import CommittedVersion, Deltas
from rlboost.services.weight_store.domain.delta_graph import (
    HOPS_BY_SPAN,
    EdgePair,
    is_worthwhile,
    join_hops,
    nearest_from_base,
)
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import Documents, StoreFull
from rlboost.shared.errors import NotFound, StoreUnavailable, Unprocessable
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.weights import codec
from rlboost.shared.weights.delta_graph import Edge, EdgeList, VersionEdges
from rlboost.shared.weights.manifest import Manifest, digest_of

log = structlog.get_logger(__name__)

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
        return codec.compose(first, second)
    except Unprocessable as error:
        log.warning("delta_not_composable", chunk=digest, error=str(error))
        return None
