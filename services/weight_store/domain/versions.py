"""The versions of one job's weights: commit by compare-and-set, pins, retention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlboost.shared.errors import Conflict, NotFound
from rlboost.shared.weights.delta_graph import Edge


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
