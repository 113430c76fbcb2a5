"""The versions of one job's weights: commit by compare-and-set, pins, retention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from rlboost.shared.errors import Conflict, NotFound, Undecodable, UnsuitableWeights
from rlboost.shared.weights.delta_graph import Edge, EdgeList
from rlboost.shared.weights.manifest import Manifest, Shape

# --- Rules of the delta graph: which of the publisher's edges are accepted, and how two hops compose to a longer one


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


# --- Parse the `Range` header of a request for a chunk ----------------------------------------------------------------


_FROM = re.compile(r"bytes=(\d{1,19})-(\d{1,19})?")


def parse_range(header: str | None, n_bytes: int) -> range | None:
    """Return the requested positions (RFC 9110, section 14.2), None if they start after the end of the chunk.

    A single range with a first byte is supported; for anything else the whole chunk is sent, as the RFC allows.

    Args:
        header: value of the header; None if absent.
        n_bytes: the chunk's size.

    """
    found = _FROM.fullmatch(header or "")
    if found is None:
        return range(n_bytes)
    first, last = int(found[1]), int(found[2] or n_bytes - 1)
    if last < first and found[2]:
        return range(n_bytes)
    return range(first, min(last + 1, n_bytes)) if first < n_bytes else None


# --- Select the chunks that garbage collection may remove -------------------------------------------------------------
# A chunk is *used* when it is uploaded, when a publisher asks whether the store has it, and when a commit checks for
# it. An upload in progress has used its chunks within the grace period. A chunk of a retired version that was not used
# since that version's commit is not part of an upload, so it is removed without waiting.


def garbage(
    last_used: Mapping[str, float],
    referenced: AbstractSet[str],
    retired: Mapping[str, float],
    *,
    now: float,
    grace_s: float,
) -> dict[str, float]:
    """Return digest -> time of last use of the chunks that may be removed.

    Args:
        last_used: digest -> time of last use, of every chunk in the store.
        referenced: digests in visible manifests and staged parts.
        retired: digest -> time of commit, of the chunks of retired versions.
        now: the current time.
        grace_s: how long an unreferenced chunk is retained.

    """
    return {
        digest: used_at
        for digest, used_at in last_used.items()
        if digest not in referenced and (used_at <= retired.get(digest, float("-inf")) or used_at < now - grace_s)
    }


# --- Versions: commit, pins, retention --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Version:
    """A committed version; `digest` is that of its manifest."""

    version: int
    digest: str
    n_bytes: int
    committed_at: float
    base: int | None = None
    """The version of the model that this adapter applies to, retained as long as this one; None for a whole model. The
    stored document has this name."""
    delta_bytes: int | None = None
    """Total size of the deltas from the previous version; None if there are none."""
    identity: str = ""
    """`Manifest.identity` of the model: of this version, or of its base. Empty of releases that did not store it."""


@dataclass(frozen=True, slots=True)
class JobVersions:
    """The versions of one job. The store replaces this state atomically; a version in `versions` is visible."""

    job_id: str
    versions: tuple[Version, ...] = ()
    """Visible versions, oldest first; the last one is the head."""
    pins: frozenset[int] = frozenset()
    retired: tuple[Version, ...] = ()
    """Versions that are no longer visible, and whose files are not yet removed."""

    @property
    def head(self) -> int:
        """Return the newest version, -1 before the first."""
        return self.versions[-1].version if self.versions else -1

    @property
    def pinned_initial_version(self) -> int | None:
        """Return the first version if it is pinned: the model that training started from."""
        first = min(self.pins, default=None)
        return first if first is not None and self.versions and first == self.versions[0].version else None

    def find(self, version: int) -> Version | None:
        """Return a visible version."""
        return next((known for known in self.versions if known.version == version), None)


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The chunks that keep a version from being committed."""

    missing: str
    """How many of the version's chunks are missing, such as "3 of 10"."""
    edges: Sequence[Edge]
    """The edges that lead to missing chunks."""
    unrecorded: Sequence[str]
    """Digests of derived chunks that must be written, because no edge of the version leads to them."""


def check_commit(job: JobVersions, version: int, expect: int, base: int | None = None) -> None:
    """Check that a new version may become the head.

    Raises:
        Conflict: the head is not the expected one or not below the version, or the base is not a retained model.

    """
    if job.head != expect:
        raise Conflict(f"the head of job {job.job_id} is {job.head}, not {expect}: another process has committed")
    if version <= expect:
        raise Conflict(f"version {version} of job {job.job_id} is not above the head {expect}")
    if base is not None and ((found := job.find(base)) is None or found.base is not None):
        raise Conflict(f"version {version} of job {job.job_id}: its base {base} is not a retained model")


def check_tensors(version: int, manifest: Manifest, head: Manifest) -> None:
    """Check that a version of a whole model has the tensors of the head: no worker would load another set.

    Raises:
        UnsuitableWeights: it has not; names the first ones that differ.

    """
    new, old = _shapes(manifest), _shapes(head)
    if new == old:
        return
    named = (
        ("new", sorted(new.keys() - old.keys())),
        ("missing", sorted(old.keys() - new.keys())),
        ("of another shape", sorted(name for name in new.keys() & old.keys() if new[name] != old[name])),
    )
    differing = "; ".join(f"{len(names)} {how}, such as {', '.join(names[:2])}" for how, names in named if names)
    raise UnsuitableWeights(
        f"version {version} of job {manifest.job_id} has other tensors than version {head.version}: {differing}. "
        "Publish the names and shapes of the model's Hugging Face checkpoint, without prefixes such as '_orig_mod.' "
        "(compiled) or 'module.' (DDP). Another model needs another job"
    )


def _shapes(manifest: Manifest) -> dict[str, Shape]:
    """Return the shape of each tensor by name, less the output layer: one that is tied may be published or not."""
    entries = (entry for part in manifest.parts for entry in part.tensors)
    return {entry.name: entry.global_shape for entry in entries if not entry.name.endswith("lm_head.weight")}


def commit(job: JobVersions, new: Version, *, keep: int) -> JobVersions:
    """Return the job's versions with a new head; those not among the `keep` newest, pinned or a base are retired."""
    return retire(replace(job, versions=(*job.versions, new)), keep=keep)


def pin(job: JobVersions, version: int) -> JobVersions:
    """Return the job's versions with one pinned.

    Raises:
        NotFound: the version is not visible.

    """
    if job.find(version) is None:
        raise NotFound(f"version {version} of job {job.job_id} is not retained")
    return replace(job, pins=job.pins | {version})


def unpin(job: JobVersions, version: int, *, keep: int) -> JobVersions:
    """Return the job's versions with one unpinned, and retired if it is not among the newest."""
    return retire(replace(job, pins=job.pins - {version}), keep=keep)


def retire_all(job: JobVersions) -> JobVersions:
    """Return the job's versions, all retired, pinned ones included."""
    return JobVersions(job.job_id, retired=(*job.retired, *job.versions))


def forget_retired(job: JobVersions, removed: tuple[Version, ...]) -> JobVersions:
    """Return the job's versions without the retired ones whose files were removed."""
    return replace(job, retired=tuple(version for version in job.retired if version not in removed))


def retire(job: JobVersions, *, keep: int) -> JobVersions:
    """Return the job's versions; those not among the `keep` newest, pinned or a base are retired."""
    retained = {version.version for version in job.versions[-keep:]} | job.pins
    retained |= {version.base for version in job.versions if version.version in retained and version.base is not None}
    visible = tuple(version for version in job.versions if version.version in retained)
    retired = tuple(version for version in job.versions if version not in visible)
    return replace(job, versions=visible, retired=(*job.retired, *retired))


# --- A model as the JSON document `model.json` ------------------------------------------------------------------------


_MODEL = TypeAdapter(JobVersions)


def encode_model(model: JobVersions) -> bytes:
    """Return the document."""
    return _MODEL.dump_json(model)


def decode_model(data: bytes) -> JobVersions:
    """Return the model of a document.

    Raises:
        Undecodable: the document is empty or damaged, or another version wrote it.

    """
    try:
        return _MODEL.validate_json(data)
    except ValidationError as error:
        raise Undecodable(f"model.json cannot be parsed: {error.errors()[0]['msg']}") from error
