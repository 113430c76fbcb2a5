"""The cache: verified blobs (chunks, and the deltas between them) in files on this machine, by digest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from shared.errors import Fatal
from shared.weights.exclusive import hold
from shared.weights.manifest import ChunkRef, digest_of

_DIGEST_LETTERS = 64


class Cache:
    """A directory that one process uses at a time. Its methods read and write files: call them in threads."""

    def __init__(self, root: Path) -> None:
        """Take the directory, made where it is missing; what a killed process left half-written goes.

        Raises:
            ConfigError: the directory cannot be used, or another process uses it.

        """
        self.blobs = root / "chunks"
        self.verified: set[str] = set()
        """Digests of what is there and has been seen to have its digest."""
        self._pulled_file = root / "held.json"
        self._lock = hold(root)
        with self._errors():
            self.blobs.mkdir(exist_ok=True)
            for path in self.blobs.iterdir():
                if len(path.name) != _DIGEST_LETTERS:
                    path.unlink()

    def close(self) -> None:
        """Give the directory back."""
        self._lock.close()

    def path(self, digest: str) -> Path:
        """Return where a blob is, if it is there."""
        return self.blobs / digest

    def listed(self) -> set[str]:
        """Return the digests of what is there, verified or not."""
        with self._errors():
            return {path.name for path in self.blobs.iterdir() if len(path.name) == _DIGEST_LETTERS}

    def holds(self, blob: ChunkRef) -> bool:
        """Tell whether a blob is there; what an earlier process left is verified once, and removed if it is wrong."""
        if blob.digest in self.verified:
            return True
        path = self.path(blob.digest)
        with self._errors():
            try:
                right = path.stat().st_size == blob.n_bytes and blake3().update_mmap(path).hexdigest() == blob.digest
            except FileNotFoundError:
                return False
            if not right:
                path.unlink(missing_ok=True)
                return False
        self.verified.add(blob.digest)
        return True

    def keep(self, blob: ChunkRef, data: bytes | bytearray) -> bool:
        """Store bytes if they are the blob's; tell whether they are."""
        if len(data) != blob.n_bytes or digest_of(data) != blob.digest:
            return False
        # Two of one process may bring the same blob: each has its own file until it is whole.
        partial = self.blobs / f"{blob.digest}.{id(data):x}"
        with self._errors():
            try:
                partial.write_bytes(data)
                partial.rename(self.path(blob.digest))
            finally:
                partial.unlink(missing_ok=True)
        self.verified.add(blob.digest)
        return True

    def pulled(self) -> list[tuple[str, int]]:
        """Return the (job, version) that were pulled last, by an earlier process. A hint: no file is trusted for it."""
        try:
            return [(str(job_id), int(version)) for job_id, version in json.loads(self._pulled_file.read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def remove(self, digests: AbstractSet[str]) -> None:
        """Remove blobs."""
        self.verified -= digests
        with self._errors():
            for digest in digests:
                self.path(digest).unlink(missing_ok=True)

    def prune(self, keep: AbstractSet[str], pulled: list[tuple[str, int]]) -> None:
        """Remove everything but the blobs `keep`; write down what was pulled last."""
        with self._errors():
            for digest in self.listed() - keep:
                self.path(digest).unlink()
            fresh = self._pulled_file.with_suffix(".new")
            fresh.write_text(json.dumps(pulled))
            fresh.replace(self._pulled_file)
        self.verified &= keep

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Fatal(
                f"cache directory {self.blobs.parent}: {error.strerror}; free space there, or name another one"
            ) from error
