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
    """Of an adapter version: the version of its model, which is retained as long as this one."""
    delta_bytes: int | None = None
    """Total size of the deltas from the previous version; None if there are none."""


@dataclass(frozen=True, slots=True)
class Model:
    """The versions of one job. This state is replaced atomically and decides what is visible."""

    job_id: str
    versions: tuple[Version, ...] = ()
    """Visible, oldest first; the last one is the head."""
    pins: frozenset[int] = frozenset()
    retired: tuple[Version, ...] = ()
    """No longer visible; their files are not yet removed."""

    @property
    def head(self) -> int:
        """Return the newest version, -1 before the first."""
        return self.versions[-1].version if self.versions else -1

    @property
    def base(self) -> int | None:
        """Return the first version if it is pinned: the model that training started from."""
        first = min(self.pins, default=None)
        return first if first is not None and self.versions and first == self.versions[0].version else None

    def find(self, version: int) -> Version | None:
        """Return a visible version."""
        return next((known for known in self.versions if known.version == version), None)


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The chunks that keep a version from being committed."""

    chunks: str
    """How many of the version's, "3 of 10"."""
    edges: Sequence[Edge]
    """Those that lead to missing chunks."""
    unrecorded: Sequence[str]
    """Digests of derived chunks that must be written, because no edge of the version leads to them."""


def check_commit(model: Model, version: int, expect: int, base: int | None = None) -> None:
    """Check that a new version may become the head.

    Raises:
        Conflict: the head is not the expected one or not below the version, or the base is not a retained model.

    """
    if model.head != expect:
        raise Conflict(f"the head of job {model.job_id} is {model.head}, not {expect}: another process has committed")
    if version <= expect:
        raise Conflict(f"version {version} of job {model.job_id} is not above the head {expect}")
    if base is not None and ((found := model.find(base)) is None or found.base is not None):
        raise Conflict(f"version {version} of job {model.job_id}: its base {base} is not a retained model")


def commit(model: Model, new: Version, *, keep: int) -> Model:
    """Return the model with a new head; versions that are not among the `keep` newest, pinned or a base are retired."""
    return retire(replace(model, versions=(*model.versions, new)), keep=keep)


def pin(model: Model, version: int) -> Model:
    """Return the model with a version pinned.

    Raises:
        NotFound: the version is not visible.

    """
    if model.find(version) is None:
        raise NotFound(f"version {version} of job {model.job_id} is not retained")
    return replace(model, pins=model.pins | {version})


def unpin(model: Model, version: int, *, keep: int) -> Model:
    """Return the model with a version unpinned, and retired if it is not among the newest."""
    return retire(replace(model, pins=model.pins - {version}), keep=keep)


def retire_all(model: Model) -> Model:
    """Return the model with every version retired, pinned ones included."""
    return Model(model.job_id, retired=(*model.retired, *model.versions))


def forget_retired(model: Model, removed: tuple[Version, ...]) -> Model:
    """Return the model without the retired versions whose files were removed."""
    return replace(model, retired=tuple(version for version in model.retired if version not in removed))


def retire(model: Model, *, keep: int) -> Model:
    """Return the model with the versions retired that are not among the `keep` newest, pinned or a base."""
    retained = {version.version for version in model.versions[-keep:]} | model.pins
    retained |= {version.base for version in model.versions if version.version in retained and version.base is not None}
    visible = tuple(version for version in model.versions if version.version in retained)
    retired = tuple(version for version in model.versions if version not in visible)
    return replace(model, versions=visible, retired=(*model.retired, *retired))
