"""Edges: which chunk can be had by applying which delta to which other chunk.

An edge hangs on digests, not on versions: whoever holds the base can take it, whatever version the base came from. It
is a hint. Nobody believes it before the result has the digest of the new chunk, so a wrong edge costs time and nothing
else, and a version without edges is only dearer to pull. A delta tells its own dtype and kind: see `codec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple, Self

from pydantic import Field, NonNegativeInt, model_validator

from shared.weights.manifest import CHUNK_BYTES, ChunkRef, Digest, Document

LIST_EDGES = 16_384
"""Edges of one uploaded list: in JSON they fit into a chunk."""
MAX_EDGES = 1 << 18
"""Edges of one hop: a terabyte of weights."""
MAX_HOPS = 16
MAX_DOCUMENTS = 1024


class Edge(NamedTuple):
    """Applying the blob `delta` to the chunk `base` gives the chunk `new`."""

    new: Digest
    base: Digest
    delta: Digest
    n_bytes: Annotated[int, Field(ge=1, le=CHUNK_BYTES)]
    """Of the delta."""

    @property
    def blob(self) -> ChunkRef:
        """Return the delta as the chunk store knows it."""
        return ChunkRef(self.delta, self.n_bytes)


class EdgeList(Document):
    """Edges from the chunks of one version to those of a later one."""

    base: NonNegativeInt
    """Version that the bases belong to; where to look on, not what to believe."""
    edges: Annotated[tuple[Edge, ...], Field(max_length=MAX_EDGES)]

    @model_validator(mode="after")
    def _leads_somewhere(self) -> Self:
        for edge in self.edges:
            if edge.new == edge.base:
                raise ValueError(f"an edge leads from chunk {edge.new} to itself")
        return self


class VersionEdges(Document):
    """All edges to the chunks of one version: hop 0 is what its publisher made, hop i+1 spans two of hop i."""

    version: NonNegativeInt
    at: float
    """When this was written, Unix seconds: no delta in it was uploaded later."""
    hops: Annotated[tuple[EdgeList, ...], Field(max_length=MAX_HOPS)]
    from_base: EdgeList | None = None
    """All the way from the job's first version, which a machine may have from elsewhere."""

    @model_validator(mode="after")
    def _leads_forward(self) -> Self:
        for hop in self.lists():
            if hop.base >= self.version:
                raise ValueError(f"a hop to version {self.version} begins at {hop.base}, which is not before it")
        return self

    def lists(self) -> Iterator[EdgeList]:
        """Yield every hop, the shortest first."""
        yield from self.hops
        if self.from_base is not None:
            yield self.from_base

    def edges(self) -> Iterator[Edge]:
        """Yield every edge, those of the shortest hop first."""
        for hop in self.lists():
            yield from hop.edges

    def hop_from(self, base: int) -> EdgeList | None:
        """Return the hop that begins at a version."""
        return next((hop for hop in self.lists() if hop.base == base), None)


class Route(Document):
    """What leads to a version from an older one, as far as there is anything: newest version first."""

    documents: Annotated[tuple[VersionEdges, ...], Field(max_length=MAX_DOCUMENTS)]


def lists_of(base: int, edges: Sequence[Edge]) -> list[bytes]:
    """Return the edges as encoded lists, each small enough for the chunk store; one that is empty if there are none."""
    return [
        EdgeList(base=base, edges=tuple(edges[at : at + LIST_EDGES])).encode()
        for at in range(0, max(len(edges), 1), LIST_EDGES)
    ]
