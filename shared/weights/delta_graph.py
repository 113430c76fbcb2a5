"""The delta graph: how the chunks of one version become those of a later one.

- *edge*: a delta that turns one chunk, its base, into another. It refers to digests, not to versions: it can be used by
  everyone who holds its base, whatever version the base belongs to.
- *hop*: the edges from the chunks of one version to those of a later one (`EdgeList`). The hops to one version, with
  different first versions, are stored together (`VersionEdges`).
- *route*: consecutive hops from an older version to a newer one (`Route`). The versions on it are its *stops*.

Edges are hints: the result of a delta is digest-checked, so a wrong edge costs time only, and a version without edges
is pulled whole. A delta's dtype and kind are in its own header: see `codec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple, Self

from pydantic import Field, FiniteFloat, NonNegativeInt, model_validator

from rlboost.shared.weights.manifest import CHUNK_BYTES, ChunkRef, Digest, Document

LIST_EDGES = 16_384
"""Edges in one uploaded list, so that its JSON fits into a chunk."""
MAX_EDGES = 1 << 18
"""Edges of one hop: enough for a terabyte of weights."""
MAX_HOPS = 16
MAX_DOCUMENTS = 1024


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
