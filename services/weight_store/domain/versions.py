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

    def find(self, version: int) -> Version | None:
        """Return a visible version."""
        return next((known for known in self.versions if known.version == version), None)


def check_commit(model: Model, version: int, expect: int) -> None:
    """Check that a new version may become the head.

    Raises:
        Conflict: the head is not the expected one, or not below the version.

    """
    if model.head != expect:
        raise Conflict(f"the head of job {model.job_id} is {model.head}, not {expect}: somebody else has committed")
    if version <= expect:
        raise Conflict(f"version {version} of job {model.job_id} is not above the head {expect}")


def commit(model: Model, new: Version, *, keep: int) -> Model:
    """Return the model with a new head, and what is no longer among the `keep` newest or pinned retired."""
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
    newest = {version.version for version in model.versions[-keep:]}
    stays = tuple(version for version in model.versions if version.version in newest | model.pins)
    goes = tuple(version for version in model.versions if version not in stays)
    return replace(model, versions=stays, retired=(*model.retired, *goes))
