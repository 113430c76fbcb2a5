"""A cache of verified blobs (chunks and deltas) in files on this machine, named by digest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from rlboost.shared.atomic_file import replace_file
from rlboost.shared.errors import Fatal
from rlboost.shared.weights.directory_lock import lock_directory
from rlboost.shared.weights.manifest import ChunkRef, digest_of

_DIGEST_LETTERS = 64


class Cache:
    """A cache directory, locked by one process. Its methods block on files: call them in threads."""

    def __init__(self, root: Path) -> None:
        """Create the directory if needed, lock it, and remove partial files of a killed process.

        Raises:
            ConfigError: the directory is not writable, or another process uses it.

        """
        self.blobs = root / "chunks"
        self.verified: set[str] = set()
        """Digests of the blobs verified by this process."""
        self._pulled_file = root / "held.json"
        self._lock = lock_directory(root)
        with self._errors():
            self.blobs.mkdir(exist_ok=True)
            for path in self.blobs.iterdir():
                if len(path.name) != _DIGEST_LETTERS:
                    path.unlink()

    def close(self) -> None:
        """Release the directory."""
        self._lock.close()

    def path(self, digest: str) -> Path:
        """Return the path of a blob, which may not exist."""
        return self.blobs / digest

    def digests(self) -> set[str]:
        """Return the digests of all blobs, verified or not."""
        with self._errors():
            return {path.name for path in self.blobs.iterdir() if len(path.name) == _DIGEST_LETTERS}

    def holds(self, blob: ChunkRef) -> bool:
        """Return True if the cache holds the blob. An unverified one is verified, and removed if corrupt."""
        if blob.digest in self.verified:
            return True
        path = self.path(blob.digest)
        with self._errors():
            try:
                is_intact = (
                    path.stat().st_size == blob.n_bytes and blake3().update_mmap(path).hexdigest() == blob.digest
                )
            except FileNotFoundError:
                return False
            if not is_intact:
                path.unlink(missing_ok=True)
                return False
        self.verified.add(blob.digest)
        return True

    def store(self, blob: ChunkRef, data: bytes | bytearray | memoryview) -> bool:
        """Store the blob if the bytes have its length and digest; return True if they do."""
        if len(data) != blob.n_bytes or digest_of(data) != blob.digest:
            return False
        with self._errors():
            replace_file(self.path(blob.digest), data)
        self.verified.add(blob.digest)
        return True

    def last_pulled(self) -> list[tuple[str, int]]:
        """Return the (job, version) pairs that an earlier process pulled last. A hint: blobs are still verified."""
        try:
            return [(str(job_id), int(version)) for job_id, version in json.loads(self._pulled_file.read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def remove(self, digests: AbstractSet[str]) -> None:
        """Remove blobs, if they exist."""
        self.verified -= digests
        with self._errors():
            for digest in digests:
                self.path(digest).unlink(missing_ok=True)

    def prune(self, keep: AbstractSet[str], pulled: list[tuple[str, int]]) -> None:
        """Remove all blobs but `keep`, and record what was pulled last."""
        with self._errors():
            for digest in self.digests() - keep:
                self.path(digest).unlink()
            replace_file(self._pulled_file, json.dumps(pulled))
        self.verified &= keep

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Fatal(
                f"cache directory {self.blobs.parent}: {error.strerror}; free space there, or set another directory"
            ) from error
