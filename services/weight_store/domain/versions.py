"""Which versions of one job's weights exist: commit by compare-and-set, pins, retention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.errors import Conflict, NotFound


@dataclass(frozen=True, slots=True)
class Version:
    """A committed version; `digest` is its manifest's."""

    version: int
    digest: str
    n_bytes: int
    committed_at: float
    base: int | None = None
    """An adapter version: the one with the model below the adapter, which stays as long as this one."""
    delta_bytes: int | None = None
    """Of the deltas from the version before it; None where there are none."""


@dataclass(frozen=True, slots=True)
class Model:
    """One job's weights. This state, replaced as a whole, decides what is visible."""

    job_id: str
    versions: tuple[Version, ...] = ()
    """Visible, oldest first; the last one is the head."""
    pins: frozenset[int] = frozenset()
    retired: tuple[Version, ...] = ()
    """No longer visible, their files not yet removed."""

    @property
    def head(self) -> int:
        """Return the newest version, -1 before the first."""
        return self.versions[-1].version if self.versions else -1

    @property
    def base(self) -> int | None:
        """Return the first version if it stays: pinned, with the model that everything began with."""
        first = min(self.pins, default=None)
        return first if first is not None and self.versions and first == self.versions[0].version else None

    def find(self, version: int) -> Version | None:
        """Return a visible version."""
        return next((known for known in self.versions if known.version == version), None)


def check_commit(model: Model, version: int, expect: int, base: int | None = None) -> None:
    """Check that a new version may become the head.

    Raises:
        Conflict: the head is not the expected one, or not below the version; or the base is no whole model that is
            kept.

    """
    if model.head != expect:
        raise Conflict(f"the head of job {model.job_id} is {model.head}, not {expect}: somebody else has committed")
    if version <= expect:
        raise Conflict(f"version {version} of job {model.job_id} is not above the head {expect}")
    if base is not None and ((found := model.find(base)) is None or found.base is not None):
        raise Conflict(f"version {version} of job {model.job_id}: its base {base} is no whole model that is kept")


def commit(model: Model, new: Version, *, keep: int) -> Model:
    """Return the model with a new head, and what is not among the `keep` newest, pinned or a base of these retired."""
    return _retire(replace(model, versions=(*model.versions, new)), keep)


def pin(model: Model, version: int) -> Model:
    """Return the model with a version pinned.

    Raises:
        NotFound: the version is not visible.

    """
    if model.find(version) is None:
        raise NotFound(f"version {version} of job {model.job_id} is not kept")
    return replace(model, pins=model.pins | {version})


def unpin(model: Model, version: int, *, keep: int) -> Model:
    """Return the model with a version unpinned, and retired when it is old."""
    return _retire(replace(model, pins=model.pins - {version}), keep)


def forget_retired(model: Model, removed: tuple[Version, ...]) -> Model:
    """Return the model without those retired versions whose files are gone."""
    return replace(model, retired=tuple(version for version in model.retired if version not in removed))


def _retire(model: Model, keep: int) -> Model:
    wanted = {version.version for version in model.versions[-keep:]} | model.pins
    wanted |= {version.base for version in model.versions if version.version in wanted and version.base is not None}
    stays = tuple(version for version in model.versions if version.version in wanted)
    goes = tuple(version for version in model.versions if version not in stays)
    return replace(model, versions=stays, retired=(*model.retired, *goes))
