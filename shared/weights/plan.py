"""Plans how to obtain every chunk of a version with the fewest bytes, given the chunks in the cache. Pure.

Chunks are the nodes and deltas the edges of a graph. One search from all held chunks (Dijkstra, 1959) finds the
cheapest path of deltas to every reachable chunk; a chunk that costs less whole is fetched whole.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from rlboost.shared.weights.delta_graph import Edge, VersionEdges
from rlboost.shared.weights.manifest import ChunkRef

FETCH_BYTES = 16 << 10
"""Cost of one request in bytes: headers and round trip. It keeps a plan from using many tiny deltas."""


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
