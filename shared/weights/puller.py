"""Pulling: a version's chunks come into a cache directory, each verified before it has its name.

A transfer that breaks goes on from its last byte, in this process or the next: what has come of a chunk is kept beside
it as `.partial`. What is whole is kept too, so of a new version only the chunks that changed are fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from shared.errors import Corrupt, Fatal
from shared.waiting import Waits
from shared.weights.client import StoreClient, persistently
from shared.weights.exclusive import hold
from shared.weights.manifest import ChunkRef, Manifest
from shared.weights.parallel import for_each
from shared.weights.pulled import PulledVersion

_WRITE_BYTES = 1 << 20
_KEPT_VERSIONS = 2
"""The version that is loaded, and the one that is to replace it."""


class Puller:
    """Fetches versions from one weight store into a cache directory that no other process uses meanwhile.

    What the last two pulls returned stays readable; chunks of older ones are removed.
    """

    def __init__(
        self, client: StoreClient, cache: Path, waits: Waits, *, concurrency: int = 8, limit_s: float = 600.0
    ) -> None:
        """Use an open client and take the cache directory, which is made where it is missing.

        Args:
            client: of the store to pull from.
            cache: the directory.
            waits: where a pull under way is listed.
            concurrency: chunks fetched at a time.
            limit_s: longest time for one pull, the store's absence included.

        Raises:
            ConfigError: the directory cannot be used, or another process uses it.

        """
        self._client = client
        self._waits = waits
        self._concurrency = concurrency
        self._limit_s = limit_s
        self._chunks = cache / "chunks"
        self._verified: set[str] = set()
        self._kept: list[Manifest] = []
        self._one_at_a_time = asyncio.Lock()
        self._lock = hold(cache)
        with _disk_errors(cache):
            self._chunks.mkdir(exist_ok=True)

    def close(self) -> None:
        """Give the cache directory back."""
        self._lock.close()

    async def pull(self, job_id: str, version: int) -> PulledVersion:
        """Bring a committed version into the cache.

        Raises:
            NotFound: the store does not have it (any more).
            Corrupt: what the store sent twice does not have its digest.
            Timeout: it took longer than the limit.
            Fatal: the cache's disk is full.

        """
        wait = self._waits.on(
            f"the weight store at {self._client.url}",
            because=f"pull version {version} of job {job_id}",
            limit_s=self._limit_s,
        )
        async with wait, self._one_at_a_time:
            manifest = await persistently(lambda: self._client.manifest(job_id, version))
            await for_each(manifest.chunks(), self._fetch, concurrency=self._concurrency, name="weights-pull")
            self._kept = [*(kept for kept in self._kept if kept != manifest), manifest][-_KEPT_VERSIONS:]
            await asyncio.to_thread(self._prune)
        return PulledVersion(manifest, self._chunks)

    async def _fetch(self, chunk: ChunkRef) -> None:
        if await asyncio.to_thread(self._holds, chunk):
            return
        for _ in range(2):
            await persistently(lambda: self._download(chunk))
            if await asyncio.to_thread(self._accept, chunk):
                return
        raise Corrupt(f"weight store at {self._client.url}: chunk {chunk.digest} came twice with another digest")

    async def _download(self, chunk: ChunkRef) -> None:
        """Fetch what the partial file lacks; when the transfer breaks, keep what came."""
        partial = self._partial(chunk)
        start = await asyncio.to_thread(_size, partial)
        if start >= chunk.n_bytes:
            return
        async with self._client.chunk(chunk.digest, start) as (first, blocks):
            held: list[bytes] = []
            try:
                async for block in blocks:
                    held.append(block)  # noqa: PERF401 # what came before a break must not be lost
            finally:
                await asyncio.to_thread(_write, partial, first, held)

    def _accept(self, chunk: ChunkRef) -> bool:
        """Give a complete partial file its name, or remove it when it is not the chunk."""
        partial = self._partial(chunk)
        with _disk_errors(self._chunks):
            if not _is_chunk(partial, chunk):
                partial.unlink(missing_ok=True)
                return False
            partial.rename(self._chunks / chunk.digest)
        self._verified.add(chunk.digest)
        return True

    def _holds(self, chunk: ChunkRef) -> bool:
        """Tell whether the chunk is in the cache; what an earlier process left there is verified once."""
        if chunk.digest in self._verified:
            return True
        path = self._chunks / chunk.digest
        with _disk_errors(self._chunks):
            if not _is_chunk(path, chunk):
                path.unlink(missing_ok=True)
                return False
        self._verified.add(chunk.digest)
        return True

    def _prune(self) -> None:
        keep = {chunk.digest for manifest in self._kept for chunk in manifest.chunks()}
        with _disk_errors(self._chunks):
            for path in self._chunks.iterdir():
                if path.name not in keep:
                    path.unlink()
        self._verified &= keep

    def _partial(self, chunk: ChunkRef) -> Path:
        return self._chunks / f"{chunk.digest}.partial"


def _write(partial: Path, first: int, blocks: list[bytes]) -> None:
    with _disk_errors(partial.parent), partial.open("ab" if first else "wb") as file:
        file.writelines(blocks)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_chunk(path: Path, chunk: ChunkRef) -> bool:
    return _size(path) == chunk.n_bytes and blake3().update_mmap(path).hexdigest() == chunk.digest


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Fatal(f"cache directory {cache}: {error.strerror}; free space there, or name another one") from error
