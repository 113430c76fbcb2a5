"""Chunks and documents of the weight store in a local directory.

    chunks/ab/abcdef...           a chunk, named by its digest; its modification time is that of its last use
    models/JOB/model.json         the model: what is visible
    models/JOB/manifests/7.json   manifest of version 7
    models/JOB/edges/7.json       deltas that lead to the chunks of version 7
    models/JOB/parts/7-0.json     rank 0's part of version 7, staged for the commit
    nonce                         random, written at start: see `ChunkDirectory`
    tmp/                          files being written; emptied at start
    lock                          locked by the process that uses the directory

Every file is written under `tmp`, flushed to disk and renamed: it is complete or absent, even if the process is killed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from rlboost.services.weight_store.domain.versions import JobVersions, decode_model, encode_model
from rlboost.services.weight_store.ports import BadChunk, LocalFile, StagedPart, StoreFull
from rlboost.shared.errors import Fatal, NotFound
from rlboost.shared.files import lock_directory, replace_file, sync_path, temporary_file
from rlboost.shared.weights.manifest import ChunkRef
from rlboost.shared.weights.rest_models import NONCE_FILE, ChunkDirectory, chunk_path

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StoreDirectory:
    """The root directory, locked by this process, with atomic writes."""

    def __init__(self, root: Path) -> None:
        """Create the directory if needed, lock it, and remove partial files of a killed process.

        Raises:
            ConfigError: it is not writable, or another process uses it.

        """
        self.root = root
        self.chunks, self.models, self._tmp = root / "chunks", root / "models", root / "tmp"
        self._lock = lock_directory(root)
        with self.errors():
            for path in (self.models, self._tmp, *(self.chunks / f"{number:02x}" for number in range(256))):
                path.mkdir(parents=True, exist_ok=True)
            for leftover in self._tmp.iterdir():
                leftover.unlink()
            nonce = secrets.token_hex(16)
            replace_file(root / NONCE_FILE, nonce)
        self.shared = ChunkDirectory(path=str(root.resolve()), nonce=nonce)
        """Location of the chunks, for clients on the same file system."""

    def close(self) -> None:
        """Release the directory."""
        self._lock.close()

    @contextmanager
    def written(self, blocks: Sequence[bytes | memoryview], now: float | None) -> Iterator[Path]:
        """Write a temporary file with this content and modification time, flushed to disk, for the body to rename.

        Raises:
            StoreFull: the disk is full; the file is removed.

        """
        mtime_ns = None if now is None else _nanoseconds(now)
        with self.errors(), temporary_file(self._tmp, blocks, sync=True, mtime_ns=mtime_ns) as temporary:
            yield temporary

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate errors of the file system."""
        try:
            yield
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise StoreFull(
                    f"no space left in the weight store's directory {self.root} ({error.strerror}): free space, "
                    "or retain fewer versions"
                ) from error
            raise Fatal(f"the weight store's directory {self.root}: {error}") from error


class DiskChunks:
    """`ports.Chunks` on files."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self._locks = threading.Lock()
        """Held while a chunk is added, marked or removed: a chunk reported as present is not removed concurrently."""
        self._unsynced: set[Path] = set()
        """Directories with names of chunks that a power failure could lose."""

    def path(self, digest: str) -> Path:
        """Return the path of a chunk, which may not exist."""
        return chunk_path(self._directory.root, digest)

    async def put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
        """See `Chunks.put`. The digest is checked before anything is written."""
        await asyncio.to_thread(self._put, digest, blocks, now)

    def _put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
        hasher = blake3()
        for block in blocks:
            hasher.update(block)
        if hasher.hexdigest() != digest:
            raise BadChunk(f"the bytes have the digest {hasher.hexdigest()}, not {digest}: send them again")
        with self._directory.written(blocks, now) as temporary, self._locks:
            temporary.replace(self.path(digest))
            self._unsynced.add(self.path(digest).parent)

    async def sync(self) -> None:
        await asyncio.to_thread(self._sync)

    def _sync(self) -> None:
        with self._locks:
            directories, self._unsynced = self._unsynced, set()
        with self._directory.errors():
            for directory in directories:
                sync_path(directory)

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        return await asyncio.to_thread(self._missing, chunks, now)

    def _missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        missing = []
        for chunk in chunks:
            path = self.path(chunk.digest)
            with self._directory.errors(), self._locks:
                if path.exists() and path.stat().st_size == chunk.n_bytes:
                    os.utime(path, ns=(_nanoseconds(now), _nanoseconds(now)))
                else:
                    missing.append(chunk.digest)
        return missing

    async def read(self, digest: str) -> bytes:
        return await asyncio.to_thread(self._read, digest)

    def _read(self, digest: str) -> bytes:
        with self._directory.errors():
            try:
                return self.path(digest).read_bytes()
            except FileNotFoundError as error:
                raise NotFound(f"there is no chunk {digest}") from error

    async def read_into(self, digest: str, buffer: bytearray) -> memoryview:
        return await asyncio.to_thread(self._read_into, digest, buffer)

    def _read_into(self, digest: str, buffer: bytearray) -> memoryview:
        with self._directory.errors():
            try:
                with self.path(digest).open("rb") as file:
                    n_bytes = os.fstat(file.fileno()).st_size
                    target = memoryview(buffer if n_bytes <= len(buffer) else bytearray(n_bytes))[:n_bytes]
                    return target[: file.readinto(target)]
            except FileNotFoundError as error:
                raise NotFound(f"there is no chunk {digest}") from error

    async def source(self, digest: str) -> LocalFile:
        path = self.path(digest)
        try:
            return LocalFile(path, await asyncio.to_thread(path.stat))
        except FileNotFoundError as error:
            raise NotFound(f"there is no chunk {digest}") from error

    def open(self, digest: str) -> BinaryIO | None:
        """Open the file of a chunk, None if there is none. Blocks on files."""
        try:
            return self.path(digest).open("rb", buffering=0)
        except FileNotFoundError:
            return None

    async def n_bytes(self) -> int:
        return await asyncio.to_thread(self._n_bytes)

    def _n_bytes(self) -> int:
        # Under the lock no chunk disappears between its listing and its size.
        with self._directory.errors(), self._locks:
            return sum(path.stat().st_size for path in self._directory.chunks.glob("*/*"))

    async def last_used(self) -> dict[str, float]:
        return await asyncio.to_thread(self._last_used)

    def _last_used(self) -> dict[str, float]:
        with self._directory.errors():
            return {path.name: _time(path) for path in self._directory.chunks.glob("*/*")}

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        await asyncio.to_thread(self._remove, unused_since)

    def _remove(self, unused_since: Mapping[str, float]) -> None:
        for digest, used_at in unused_since.items():
            path = self.path(digest)
            with self._directory.errors(), self._locks:
                if path.exists() and _time(path) <= used_at:
                    path.unlink()


class DiskDocuments:
    """`ports.Documents` on files."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory

    async def jobs(self) -> list[str]:
        return await asyncio.to_thread(lambda: sorted(path.name for path in self._directory.models.iterdir()))

    async def versions_of(self, job_id: str) -> JobVersions:
        try:
            return decode_model(await self._read(self._job(job_id) / "model.json"))
        except NotFound:
            return JobVersions(job_id)

    async def save_versions(self, job: JobVersions) -> None:
        await self._write(self._job(job.job_id) / "model.json", encode_model(job))

    async def put_manifest(self, job_id: str, version: int, data: bytes) -> None:
        await self._write(self._manifest(job_id, version), data)

    async def manifest(self, job_id: str, version: int) -> bytes:
        return await self._read(self._manifest(job_id, version))

    async def remove_manifest(self, job_id: str, version: int) -> None:
        await asyncio.to_thread(self._manifest(job_id, version).unlink, missing_ok=True)

    async def put_edges(self, job_id: str, version: int, data: bytes) -> None:
        await self._write(self._edges(job_id, version), data)

    async def edges(self, job_id: str, version: int) -> bytes:
        return await self._read(self._edges(job_id, version))

    async def edge_versions(self, job_id: str) -> list[int]:
        folder = self._job(job_id) / "edges"
        return await asyncio.to_thread(lambda: sorted(int(path.stem) for path in folder.glob("*.json")))

    async def remove_edges(self, job_id: str, version: int) -> None:
        await asyncio.to_thread(self._edges(job_id, version).unlink, missing_ok=True)

    async def put_part(self, job_id: str, part: StagedPart, data: bytes) -> None:
        await self._write(self._part(job_id, part.version, part.rank), data, part.staged_at)

    async def part(self, job_id: str, version: int, rank: int) -> bytes:
        return await self._read(self._part(job_id, version, rank))

    async def parts(self, job_id: str) -> list[StagedPart]:
        def scan() -> list[StagedPart]:
            found = []
            for path in self._directory.models.joinpath(job_id, "parts").glob("*.json"):
                version, _, rank = path.stem.partition("-")
                found.append(StagedPart(int(version), int(rank), _time(path)))
            return sorted(found, key=lambda part: (part.version, part.rank))

        return await asyncio.to_thread(scan)

    async def remove_part(self, job_id: str, part: StagedPart) -> None:
        await asyncio.to_thread(self._part(job_id, part.version, part.rank).unlink, missing_ok=True)

    def _job(self, job_id: str) -> Path:
        return self._directory.models / job_id

    def _manifest(self, job_id: str, version: int) -> Path:
        return self._job(job_id) / "manifests" / f"{version}.json"

    def _edges(self, job_id: str, version: int) -> Path:
        return self._job(job_id) / "edges" / f"{version}.json"

    def _part(self, job_id: str, version: int, rank: int) -> Path:
        return self._job(job_id) / "parts" / f"{version}-{rank}.json"

    async def _read(self, path: Path) -> bytes:
        try:
            return await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError as error:
            raise NotFound(f"the weight store has no {path.relative_to(self._directory.models)}") from error

    async def _write(self, path: Path, data: bytes, now: float | None = None) -> None:
        await asyncio.to_thread(self._replace, path, data, now)

    def _replace(self, path: Path, data: bytes, now: float | None) -> None:
        with self._directory.written([data], now) as temporary:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(path)
            sync_path(path.parent)


def _nanoseconds(now: float) -> int:
    """Round a time to whole microseconds, which `_time` gives back exactly."""
    return round(now * 1e6) * 1000


def _time(path: Path) -> float:
    return path.stat().st_mtime_ns // 1000 / 1e6
