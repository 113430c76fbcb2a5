"""Pulling: a version's chunks come into a cache directory, each verified before it has its name.

A transfer that breaks goes on from its last byte, in this process or the next: what has come of a chunk is kept beside
it as `.partial`. What is whole is kept too, so of a new version only the chunks that changed are fetched, and of those
only the deltas where the store has some that lead there from a chunk in the cache. A chunk that does not come out of
its deltas right is fetched whole.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from blake3 import blake3

from shared.errors import Bury, Corrupt, Fatal
from shared.waiting import Waits
from shared.weights.client import StoreClient, persistently
from shared.weights.edges import MAX_EDGES, Edge
from shared.weights.exclusive import hold
from shared.weights.manifest import ChunkRef, Manifest
from shared.weights.parallel import for_each
from shared.weights.plan import Plan, Way, next_stop, plan
from shared.weights.pulled import PulledVersion
from shared.weights.rebuild import rebuilt

log = structlog.get_logger(__name__)

_WRITE_BYTES = 1 << 20
_KEPT_VERSIONS = 2
"""The version that is loaded, and the one that is to replace it."""
_DIGEST_LETTERS = 64


@dataclass(slots=True)
class Transfer:
    """What one pull took."""

    bytes_dense: int = 0
    """Of chunks that were fetched whole."""
    bytes_delta: int = 0
    """Of deltas, those in vain included."""
    chunks_held: int = 0
    chunks_dense: int = 0
    chunks_delta: int = 0
    fallbacks: int = 0
    """Chunks that were fetched whole because they did not come out of their deltas."""


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
        self._held_file = cache / "held.json"
        self.last = Transfer()
        """Of the pull under way, or the last one."""
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
            self.last = Transfer()
            ways = (await self._plan(manifest)).ways
            await for_each(ways, self._bring, concurrency=self._concurrency, name="weights-pull")
            log.info("weights_pulled", job=job_id, version=version, **asdict(self.last))
            self._kept = [*(kept for kept in self._kept if kept != manifest), manifest][-_KEPT_VERSIONS:]
            await asyncio.to_thread(self._prune)
        return PulledVersion(manifest, self._chunks)

    async def _plan(self, manifest: Manifest) -> Plan:
        held, have = await asyncio.to_thread(self._cached, manifest)
        wanted = list(manifest.chunks())
        edges: list[Edge] = []
        if held and any(chunk.digest not in held for chunk in wanted):
            edges = await self._edges(manifest.job_id, manifest.version, have)
        return await asyncio.to_thread(plan, wanted, edges, held)

    async def _edges(self, job_id: str, version: int, have: int) -> list[Edge]:
        """Return the edges between two versions, as far as the store has them."""
        edges: list[Edge] = []
        stop: int | None = version
        while stop is not None and len(edges) < MAX_EDGES:
            at = stop
            document = await persistently(lambda: self._client.edges(job_id, at))  # noqa: B023 - awaited at once
            if document is None or document.version != at:
                break
            edges += document.edges()
            stop = next_stop(document, have)
        return edges

    async def _bring(self, way: Way) -> None:
        if way.held and await asyncio.to_thread(self._holds, way.chunk):
            self.last.chunks_held += 1
            return
        if way.path and await self._rebuild(way):
            self.last.chunks_delta += 1
            return
        await self._fetch(way.chunk)
        self.last.chunks_dense += 1

    async def _rebuild(self, way: Way) -> bool:
        """Make a chunk of deltas; tell whether it came out right."""
        self.last.bytes_delta += way.n_bytes
        base = self._chunks / way.path[0].base
        try:
            data = await rebuilt(self._client, way, base.read_bytes)
        except (Bury, Corrupt, FileNotFoundError) as error:
            self.last.fallbacks += 1
            log.warning("delta_failed", chunk=way.chunk.digest, error=str(error))
            return False
        await asyncio.to_thread(self._keep, way.chunk, data)
        return True

    async def _fetch(self, chunk: ChunkRef) -> None:
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
                self.last.bytes_dense += sum(map(len, held))
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

    def _keep(self, chunk: ChunkRef, data: bytes) -> None:
        """Give verified bytes their name."""
        partial = self._partial(chunk)
        _write(partial, 0, [data])
        with _disk_errors(self._chunks):
            partial.rename(self._chunks / chunk.digest)
        self._verified.add(chunk.digest)

    def _cached(self, manifest: Manifest) -> tuple[set[str], int]:
        """Return the digests in the cache, unverified, and the newest version before this one that was pulled."""
        with _disk_errors(self._chunks):
            held = {path.name for path in self._chunks.iterdir() if len(path.name) == _DIGEST_LETTERS}
        have = [version for job_id, version in self._pulled() if job_id == manifest.job_id]
        # Not known: the version before it is a guess that costs nothing.
        return held, max((version for version in have if version < manifest.version), default=manifest.version - 1)

    def _pulled(self) -> list[tuple[str, int]]:
        """Return what was pulled last, by an earlier process too. A hint only: no file of this name is trusted."""
        if self._kept:
            return [(kept.job_id, kept.version) for kept in self._kept]
        try:
            return [(str(job_id), int(version)) for job_id, version in json.loads(self._held_file.read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

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
            fresh = self._held_file.with_suffix(".new")
            fresh.write_text(json.dumps([(kept.job_id, kept.version) for kept in self._kept]))
            fresh.replace(self._held_file)
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
