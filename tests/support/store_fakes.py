"""Fakes of `ports`, held to the contract of `tests/contract/weight_store/test_weight_origin_contract.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from blake3 import blake3

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.services.weight_store.ports import BadChunk, Proxied, StagedPart, StoreFull
from rlboost.shared.errors import NotFound
from rlboost.shared.weights.manifest import ChunkRef


class MemoryChunks:
    """`ports.Chunks` in one process."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, float]] = {}
        """Digest -> content, last used at."""
        self.full = False
        """True: every write fails as on a full disk."""

    async def sync(self) -> None:
        """See `Chunks.sync`."""

    async def put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
        data = b"".join(blocks)
        if blake3(data).hexdigest() != digest:
            raise BadChunk(f"the bytes do not have the digest {digest}")
        if self.full:
            raise StoreFull("no room in the fake")
        self.held[digest] = data, now

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        missing = [chunk.digest for chunk in chunks if len(self.held.get(chunk.digest, (b"", 0))[0]) != chunk.n_bytes]
        for chunk in chunks:
            if chunk.digest not in missing:
                self.held[chunk.digest] = self.held[chunk.digest][0], now
        return missing

    async def read(self, digest: str) -> bytes:
        try:
            return self.held[digest][0]
        except KeyError as error:
            raise NotFound(f"no chunk {digest}") from error

    async def read_into(self, digest: str, buffer: bytearray) -> memoryview:
        return memoryview(bytearray(await self.read(digest)))

    async def source(self, digest: str) -> Proxied:
        data = await self.read(digest)

        async def blocks(start: int, stop: int) -> AsyncIterator[bytes]:
            async def all_at_once() -> AsyncIterator[bytes]:
                yield data[start:stop]

            return all_at_once()

        return Proxied(len(data), blocks)

    async def n_bytes(self) -> int:
        return sum(len(data) for data, _ in self.held.values())

    async def last_used(self) -> dict[str, float]:
        return {digest: used_at for digest, (_, used_at) in self.held.items()}

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        for digest, used_at in unused_since.items():
            if digest in self.held and self.held[digest][1] <= used_at:
                del self.held[digest]


class MemoryDocuments:
    """`ports.Documents` in one process."""

    def __init__(self) -> None:
        self._versions: dict[str, JobVersions] = {}
        self._manifests: dict[tuple[str, int], bytes] = {}
        self._edges: dict[tuple[str, int], bytes] = {}
        self._parts: dict[tuple[str, int, int], tuple[StagedPart, bytes]] = {}

    async def jobs(self) -> list[str]:
        return sorted({*self._versions, *(key[0] for key in self._manifests), *(key[0] for key in self._parts)})

    async def versions_of(self, job_id: str) -> JobVersions:
        return self._versions.get(job_id, JobVersions(job_id))

    async def save_versions(self, job: JobVersions) -> None:
        self._versions[job.job_id] = job

    async def put_manifest(self, job_id: str, version: int, data: bytes) -> None:
        self._manifests[job_id, version] = data

    async def manifest(self, job_id: str, version: int) -> bytes:
        try:
            return self._manifests[job_id, version]
        except KeyError as error:
            raise NotFound(f"no manifest of version {version} of job {job_id}") from error

    async def remove_manifest(self, job_id: str, version: int) -> None:
        self._manifests.pop((job_id, version), None)

    async def put_edges(self, job_id: str, version: int, data: bytes) -> None:
        self._edges[job_id, version] = data

    async def edges(self, job_id: str, version: int) -> bytes:
        try:
            return self._edges[job_id, version]
        except KeyError as error:
            raise NotFound(f"no edges to version {version} of job {job_id}") from error

    async def edge_versions(self, job_id: str) -> list[int]:
        return sorted(version for owner, version in self._edges if owner == job_id)

    async def remove_edges(self, job_id: str, version: int) -> None:
        self._edges.pop((job_id, version), None)

    async def put_part(self, job_id: str, part: StagedPart, data: bytes) -> None:
        self._parts[job_id, part.version, part.rank] = part, data

    async def part(self, job_id: str, version: int, rank: int) -> bytes:
        try:
            return self._parts[job_id, version, rank][1]
        except KeyError as error:
            raise NotFound(f"no part of rank {rank} of version {version} of job {job_id}") from error

    async def parts(self, job_id: str) -> list[StagedPart]:
        return [part for (owner, _, _), (part, _) in sorted(self._parts.items()) if owner == job_id]

    async def remove_part(self, job_id: str, part: StagedPart) -> None:
        self._parts.pop((job_id, part.version, part.rank), None)
