"""Bodies of the weight store's HTTP interface, besides parts and manifests."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from shared.weights.manifest import ChunkRef, Digest


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ChunkList(_Body):
    """Chunks that a publisher is about to upload."""

    chunks: tuple[ChunkRef, ...]


class MissingChunks(_Body):
    """Those of them that the store does not hold."""

    missing: tuple[Digest, ...]


class CommitRequest(_Body):
    """Make the published parts a version, if the head is still the expected one."""

    expect: int = Field(ge=-1)
    """The version that must be the head; -1 for none."""
    parts: tuple[Digest, ...] = Field(min_length=1)
    """Digest of each rank's part, rank 0 first: what one rank published in an earlier attempt is never mixed in."""
    config_json: str
    base_version: NonNegativeInt | None = None
    """As in `Manifest`."""
    adapter_json: str = ""
    """As in `Manifest`."""
    canary_json: str = ""
    """As in `Manifest`."""


class VersionInfo(_Body):
    """One committed version."""

    version: NonNegativeInt
    digest: Digest
    """Of its manifest."""
    n_bytes: NonNegativeInt
    committed_at: float
    pinned: bool
    delta_bytes: NonNegativeInt | None = None
    """Of the deltas from the version before it; None where there are none."""


class ModelInfo(_Body):
    """All kept versions of one job, oldest first; the last one is the head."""

    job_id: str
    versions: tuple[VersionInfo, ...]


class ModelList(_Body):
    """All jobs that have weights."""

    models: tuple[ModelInfo, ...]
