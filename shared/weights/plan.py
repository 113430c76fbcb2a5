"""The cheapest way to every chunk of a version, in bytes, from what is held. Pure.

Chunks are nodes and deltas are edges of a graph. One search from all held chunks at once (Dijkstra, 1959) finds the
shortest path of deltas to every chunk that can be reached; a chunk that costs less dense is taken dense.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from shared.weights.edges import Edge, VersionEdges
from shared.weights.manifest import ChunkRef

FETCH_BYTES = 16 << 10
"""What a request weighs, headers and turnaround: many tiny deltas are no bargain."""


@dataclass(frozen=True, slots=True)
class Way:
    """How to get one chunk: it is held, or the deltas of `path` in this order, or (no path) its bytes."""

    chunk: ChunkRef
    held: bool = False
    path: tuple[Edge, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Return the payload that this way fetches, headers not included."""
        if self.held:
            return 0
        return sum(edge.n_bytes for edge in self.path) or self.chunk.n_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """One way for every wanted chunk."""

    ways: tuple[Way, ...]

    @property
    def n_bytes(self) -> int:
        """Return the payload in all."""
        return sum(way.n_bytes for way in self.ways)


def plan(wanted: Iterable[ChunkRef], edges: Iterable[Edge], held: AbstractSet[str]) -> Plan:
    """Return the cheapest way to each wanted chunk.

    Args:
        wanted: the chunks of a version.
        edges: in any order; cycles, duplicates and edges that lead nowhere do no harm.
        held: digests of the chunks at hand.

    """
    chunks = list(wanted)
    longest = max((chunk.n_bytes + FETCH_BYTES for chunk in chunks if chunk.digest not in held), default=0)
    best = _search(edges, held, longest)
    return Plan(tuple(_way(chunk, best, held) for chunk in chunks))


def _way(chunk: ChunkRef, best: dict[str, tuple[int, Edge]], held: AbstractSet[str]) -> Way:
    if chunk.digest in held:
        return Way(chunk, held=True)
    cost, _ = best.get(chunk.digest, (chunk.n_bytes + FETCH_BYTES, None))
    if cost >= chunk.n_bytes + FETCH_BYTES:
        return Way(chunk)
    path: list[Edge] = []
    digest = chunk.digest
    while digest not in held:
        _, edge = best[digest]
        path.append(edge)
        digest = edge.base
    return Way(chunk, path=tuple(reversed(path)))


def _search(edges: Iterable[Edge], held: AbstractSet[str], longest: int) -> dict[str, tuple[int, Edge]]:
    """Return what each chunk costs that can be reached for less than `longest`, and the last edge to it."""
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
    """Return the version whose edges to look at next on the way back to `have`; None when there is no nearer one.

    The longest hop that does not go back beyond `have`: a lag of n takes about as many documents as n has hops.
    """
    stops = [hop.base for hop in document.lists() if hop.base > have]
    arrived = document.hop_from(have) is not None
    return None if arrived or not stops else min(stops)
