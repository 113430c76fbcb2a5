"""Request and response bodies of the weight store's REST interface; parts and manifests are in `manifest`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from rlboost.shared.weights.delta_graph import Edge
from rlboost.shared.weights.manifest import ChunkRef, Digest

NONCE_FILE = "nonce"


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ChunkList(_Body):
    """Chunks that a publisher is about to upload."""

    chunks: tuple[ChunkRef, ...]


class MissingChunks(_Body):
    """The chunks that the store does not hold."""

    missing: tuple[Digest, ...]


class ChunkState(_Body):
    """Whether a chunk was found to have its digest; one that has not is removed."""

    intact: bool


class EdgeBatch(_Body):
    """Deltas in the store that lead to the chunks to publish."""

    edges: tuple[Edge, ...]


def chunk_path(root: Path, digest: str) -> Path:
    """Return the path of a chunk below a store's directory; it may not exist."""
    return root / "chunks" / digest[:2] / digest


class ChunkDirectory(_Body):
    """Where the store has its files, for clients on the same file system."""

    path: str
    """An absolute path."""
    nonce: str
    """Content of the file `nonce` there: only a client that reads it has the same directory at this path."""

    def chunk(self, digest: str) -> Path:
        """Return the path of a chunk, which may not exist."""
        return chunk_path(Path(self.path), digest)

    def is_shared(self) -> bool:
        """Return True if this machine reads the store's files at the same path. Blocks on files."""
        try:
            return Path(self.path, NONCE_FILE).read_text(encoding="ascii") == self.nonce
        except (OSError, ValueError):
            return False


class CommitRequest(_Body):
    """Commits published parts as a version, if the head is the expected one."""

    expect: int = Field(ge=-1)
    """The version that must be the current head; -1 for none."""
    parts: tuple[Digest, ...] = Field(min_length=1)
    """Digest of each rank's part, in rank order: parts of different attempts are never mixed."""
    config_json: str
    base_version: NonNegativeInt | None = None
    """As in `Manifest`."""
    adapter_json: str = ""
    """As in `Manifest`."""
    parity_json: str = ""
    """As in `Manifest`."""
    epoch: int | None = None
    """Of the committing trainer's lease on the job, which it must still hold; None: not checked."""


class VersionInfo(_Body):
    """One committed version."""

    version: NonNegativeInt
    digest: Digest
    """Digest of its manifest."""
    n_bytes: NonNegativeInt
    committed_at: float
    pinned: bool
    delta_bytes: NonNegativeInt | None = None
    """Total size of the deltas from the previous version; None if there are none."""
    base_version: NonNegativeInt | None = None
    """As in `Manifest`."""


class ModelInfo(_Body):
    """The retained versions of one job, oldest first; the last one is the head."""

    job_id: str
    versions: tuple[VersionInfo, ...]


class ModelList(_Body):
    """All jobs that have weights."""

    models: tuple[ModelInfo, ...]
