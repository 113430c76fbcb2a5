"""Which edges a version has: what is taken from its publisher, and which pairs make a longer hop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from shared.errors import Undecodable
from shared.weights.edges import Edge, EdgeList

LONGEST_HOPS = 4
"""Hops of 1, 2, 4 and 8 versions: beyond that a delta has most of the values in it."""


LONGEST_SPAN = 2 ** (LONGEST_HOPS - 1)
"""Versions that the longest hop spans; every so many versions there is a hop from the job's first one besides."""


class Joint(NamedTuple):
    """Two edges that meet in one chunk."""

    first: Edge
    second: Edge


class Span(NamedTuple):
    """What a longer hop consists of."""

    base: int
    joints: tuple[Joint, ...]
    """To be composed."""
    copies: tuple[Edge, ...]
    """Edges that lead all the way as they are: their chunk did not change in the later half."""


def published(version: int, lists: Sequence[EdgeList], sizes: Mapping[str, int]) -> EdgeList | None:
    """Return the hop that a version's publisher made, all ranks together; None when it made none.

    Edges to chunks that are not the version's, and deltas that are not smaller than the chunk, are left out.

    Args:
        version: that is to be committed.
        lists: of all ranks.
        sizes: digest -> bytes of the version's chunks.

    Raises:
        Undecodable: a list begins at this version or a later one.

    """
    for edges in lists:
        if edges.base >= version:
            raise Undecodable(f"edges to version {version} begin at version {edges.base}, which is not before it")
    if not lists:
        return None
    base = max(edges.base for edges in lists)
    found = {
        edge.new: edge
        for edges in lists
        if edges.base == base
        for edge in edges.edges
        if edge.n_bytes < sizes.get(edge.new, 0)
    }
    return EdgeList(base=base, edges=tuple(found.values()))


def span(earlier: EdgeList, later: EdgeList, digests: AbstractSet[str]) -> Span:
    """Return how to make one hop of two that follow each other; `digests` are the chunks of the version it leads to."""
    first_by_new = {edge.new: edge for edge in earlier.edges}
    joints = tuple(
        Joint(first_by_new[edge.base], edge)
        for edge in later.edges
        if edge.base in first_by_new and first_by_new[edge.base].base != edge.new
    )
    changed = {edge.new for edge in later.edges}
    copies = tuple(edge for edge in earlier.edges if edge.new in digests and edge.new not in changed)
    return Span(earlier.base, joints, copies)


def anchor(version: int, base: int) -> int | None:
    """Return the newest version up to this one to which a hop from the base may lead; None when there is none yet."""
    newest = version - (version - base) % LONGEST_SPAN
    return newest if newest > base else None


def worth(delta_bytes: int, joint: Joint, chunk_bytes: int) -> bool:
    """Tell whether a composed delta is cheaper than both of its halves, and than half of the chunk."""
    return 2 * delta_bytes <= chunk_bytes and delta_bytes < joint.first.n_bytes + joint.second.n_bytes


def outdated(versions: Iterable[int], head: int, *, keep: int) -> list[int]:
    """Return the committed versions whose edges may go: all but the newest `keep`.

    Edges beyond the head are of a commit that is under way, or was lost and will be written over.
    """
    return sorted(version for version in versions if version <= head)[:-keep]
