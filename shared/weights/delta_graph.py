"""The delta graph: how the chunks of one version become those of a later one.

- *edge*: a delta that turns one chunk, its base, into another. It refers to digests, not to versions: it can be used by
  everyone who holds its base, whatever version the base belongs to.
- *hop*: the edges from the chunks of one version to those of a later one (`EdgeList`). The hops to one version, with
  different first versions, are stored together (`VersionEdges`).
- *route*: consecutive hops from an older version to a newer one (`Route`). The versions on it are its *stops*.

Edges are hints: the result of a delta is digest-checked, so a wrong edge costs time only, and a version without edges
is pulled whole. A delta describes itself: see `delta`.

`plan` selects, for every chunk of a version, the way with the fewest bytes, given the chunks in the cache. Chunks are
the nodes: one search from all held chunks (Dijkstra, 1959) finds the cheapest path of deltas to every reachable chunk;
a chunk that costs less whole is fetched whole.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self

from pydantic import Field, FiniteFloat, NonNegativeInt, model_validator

from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, Digest, Document

LIST_EDGES = 16_384
"""Edges in one uploaded list, so that its JSON fits into a chunk."""
MAX_EDGES = 1 << 18
"""Edges of one hop: enough for a terabyte of weights."""
MAX_HOPS = 16
MAX_DOCUMENTS = 1024
FETCH_BYTES = 16 << 10
"""Cost of one request in bytes: headers and round trip. It keeps a plan from using many tiny deltas."""


class Edge(NamedTuple):
    """Applying the blob `delta` to the chunk `base` yields the chunk `new`."""

    new: Digest
    base: Digest
    delta: Digest
    n_bytes: Annotated[int, Field(ge=1, le=CHUNK_BYTES)]
    """Size of the delta."""

    @property
    def blob(self) -> ChunkRef:
        """Return the reference to the delta in the chunk store."""
        return ChunkRef(self.delta, self.n_bytes)


class EdgeList(Document):
    """One hop; of an upload, a part of one."""

    base: NonNegativeInt
    """Version of the bases. A hint: what counts are the digests."""
    edges: Annotated[tuple[Edge, ...], Field(max_length=MAX_EDGES)]

    @model_validator(mode="after")
    def _leads_somewhere(self) -> Self:
        for edge in self.edges:
            if edge.new == edge.base:
                raise ValueError(f"an edge leads from chunk {edge.new} to itself")
        return self


class VersionEdges(Document):
    """All hops to one version. Hop 0 comes from its publisher; hop i+1 joins two hops i."""

    version: NonNegativeInt
    at: FiniteFloat
    """Time of writing in Unix seconds; all its deltas were uploaded before."""
    hops: Annotated[tuple[EdgeList, ...], Field(max_length=MAX_HOPS)]
    from_base: EdgeList | None = None
    """The hop from the job's first version, which a machine image may contain."""

    @model_validator(mode="after")
    def _leads_forward(self) -> Self:
        for hop in self.all_hops():
            if hop.base >= self.version:
                raise ValueError(f"a hop to version {self.version} starts at {hop.base}, which is not an older version")
        return self

    def all_hops(self) -> Iterator[EdgeList]:
        """Yield every hop, the shortest first."""
        yield from self.hops
        if self.from_base is not None:
            yield self.from_base

    def edges(self) -> Iterator[Edge]:
        """Yield every edge, those of the shortest hop first."""
        for hop in self.all_hops():
            yield from hop.edges

    def hop_from(self, base: int) -> EdgeList | None:
        """Return the hop from a version, None if there is none."""
        return next((hop for hop in self.all_hops() if hop.base == base), None)


class Route(Document):
    """The hops to each stop along the longest ones from an older version to a newer one, newest first."""

    documents: Annotated[tuple[VersionEdges, ...], Field(max_length=MAX_DOCUMENTS)]


def lists_of(base: int, edges: Sequence[Edge]) -> list[bytes]:
    """Return the edges as encoded lists, each small enough for a chunk; one empty list if there are none."""
    return [
        EdgeList(base=base, edges=tuple(edges[at : at + LIST_EDGES])).encode()
        for at in range(0, max(len(edges), 1), LIST_EDGES)
    ]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How to obtain one chunk: it is held, or apply the deltas of `path` in order, or (empty path) fetch it whole."""

    chunk: ChunkRef
    held: bool = False
    path: tuple[Edge, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Return the payload to fetch, without headers."""
        if self.held:
            return 0
        return sum(edge.n_bytes for edge in self.path) or self.chunk.n_bytes


def plan(needed: Iterable[ChunkRef], edges: Iterable[Edge], held: AbstractSet[str]) -> list[ChunkPlan]:
    """Return the cheapest plan for each chunk.

    Args:
        needed: the chunks of a version.
        edges: in any order; cycles, duplicates and dead ends are allowed.
        held: digests of the chunks in the cache.

    """
    chunks = list(needed)
    longest = max((chunk.n_bytes + FETCH_BYTES for chunk in chunks if chunk.digest not in held), default=0)
    best = _search(edges, held, longest)
    return [_chunk_plan(chunk, best, held) for chunk in chunks]


def _chunk_plan(chunk: ChunkRef, best: dict[str, tuple[int, Edge]], held: AbstractSet[str]) -> ChunkPlan:
    if chunk.digest in held:
        return ChunkPlan(chunk, held=True)
    cost, _ = best.get(chunk.digest, (chunk.n_bytes + FETCH_BYTES, None))
    if cost >= chunk.n_bytes + FETCH_BYTES:
        return ChunkPlan(chunk)
    path: list[Edge] = []
    digest = chunk.digest
    while digest not in held:
        _, edge = best[digest]
        path.append(edge)
        digest = edge.base
    return ChunkPlan(chunk, path=tuple(reversed(path)))


def _search(edges: Iterable[Edge], held: AbstractSet[str], longest: int) -> dict[str, tuple[int, Edge]]:
    """Return the cost of each chunk reachable for less than `longest`, and the last edge on its path."""
    leaving: defaultdict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.new not in held:
            leaving[edge.base].append(edge)
    best: dict[str, tuple[int, Edge]] = {}
    queue = [(0, digest) for digest in leaving if digest in held]
    heapq.heapify(queue)
    while queue:
        cost, digest = heapq.heappop(queue)
        if digest in best and cost > best[digest][0]:
            continue
        for edge in leaving.get(digest, ()):
            total = cost + edge.n_bytes + FETCH_BYTES
            if total < longest and (edge.new not in best or total < best[edge.new][0]):
                best[edge.new] = total, edge
                heapq.heappush(queue, (total, edge.new))
    return best


def next_stop(document: VersionEdges, have: int) -> int | None:
    """Return the stop that comes next on the route back to `have`; None if there is none.

    This is the longest hop that does not go back past `have`.
    """
    stops = [hop.base for hop in document.all_hops() if hop.base > have]
    arrived = document.hop_from(have) is not None
    return None if arrived or not stops else min(stops)
