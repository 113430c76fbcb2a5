"""Rules of the delta graph: which of the publisher's edges are accepted, and how two hops compose to a longer one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from rlboost.shared.errors import Undecodable
from rlboost.shared.weights.delta_graph import Edge, EdgeList

HOPS_BY_SPAN = 4
"""Number of hops to a version: over 1, 2, 4 and 8 versions. A longer delta contains most of the values."""
LONGEST_SPAN = 2 ** (HOPS_BY_SPAN - 1)
"""Versions spanned by the longest of them, and the interval of versions with a hop from the job's first version."""


class EdgePair(NamedTuple):
    """Two consecutive edges, through one intermediate chunk."""

    first: Edge
    second: Edge


class JoinedHop(NamedTuple):
    """The content of a hop over two consecutive ones."""

    base: int
    pairs: tuple[EdgePair, ...]
    """Edges to compose."""
    copies: tuple[Edge, ...]
    """Edges to copy: their chunk did not change in the later hop."""


def merge_uploaded(version: int, lists: Sequence[EdgeList], sizes: Mapping[str, int]) -> EdgeList | None:
    """Return the hop that a version's publisher uploaded, merged over all ranks; None if there is none.

    Edges to chunks of other versions and deltas that are not smaller than the chunk are dropped.

    Args:
        version: the version to commit.
        lists: edge lists of all ranks.
        sizes: digest -> bytes, of the version's chunks.

    Raises:
        Undecodable: the base of a list is not an older version.

    """
    for edges in lists:
        if edges.base >= version:
            raise Undecodable(
                f"edges to version {version} start at version {edges.base}, which is not an older version"
            )
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


def join_hops(earlier: EdgeList, later: EdgeList, digests: AbstractSet[str]) -> JoinedHop:
    """Return how to compose two consecutive hops; `digests` are the chunks of the target version."""
    first_by_new = {edge.new: edge for edge in earlier.edges}
    pairs = tuple(
        EdgePair(first_by_new[edge.base], edge)
        for edge in later.edges
        if edge.base in first_by_new and first_by_new[edge.base].base != edge.new
    )
    changed = {edge.new for edge in later.edges}
    copies = tuple(edge for edge in earlier.edges if edge.new in digests and edge.new not in changed)
    return JoinedHop(earlier.base, pairs, copies)


def nearest_from_base(version: int, base: int) -> int | None:
    """Return the newest version up to this one that has a hop from the base; None before the first."""
    newest = version - (version - base) % LONGEST_SPAN
    return newest if newest > base else None


def is_worthwhile(delta_bytes: int, pair: EdgePair, chunk_bytes: int) -> bool:
    """Return True if a composed delta is smaller than its two halves together and at most half of the chunk."""
    return 2 * delta_bytes <= chunk_bytes and delta_bytes < pair.first.n_bytes + pair.second.n_bytes


def outdated(versions: Iterable[int], head: int, *, keep: int) -> list[int]:
    """Return the committed versions whose edges may be removed: all but the newest `keep`.

    Edges of versions above the head belong to a commit in progress, or to a lost one that will be overwritten.
    """
    return sorted(version for version in versions if version <= head)[:-keep]
