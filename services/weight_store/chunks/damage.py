"""Finds chunks that are damaged on the store's disk, so that a publisher can upload them again.

A puller that receives a chunk with another digest has it verified, and a damaged chunk is removed. Until it is uploaded
again, requests of a chunk that a retained version needs are answered with 503, so pullers wait for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import structlog

from rlboost.services.weight_store.domain.versions import JobVersions
from rlboost.services.weight_store.ports import Chunks, Documents
from rlboost.shared.errors import NotFound, StoreUnavailable
from rlboost.shared.weights.manifest import Manifest, digest_of

log = structlog.get_logger(__name__)


class DamagedChunks:
    """Chunks that retained versions need and the store lacks, among those that were requested."""

    def __init__(self, chunks: Chunks, documents: Documents) -> None:
        """Start with none."""
        self._chunks = chunks
        self._documents = documents
        self._missing: set[str] = set()
        self._needed: dict[tuple[str, str], frozenset[str]] = {}
        """(job, digest of a manifest) -> its chunks."""

    def missing(self) -> list[str]:
        """Return the digests of chunks to be uploaded again."""
        return sorted(self._missing)

    def on_uploaded(self, digest: str) -> None:
        """Record that the store has a chunk."""
        self._missing.discard(digest)

    async def verify(self, digest: str) -> bool:
        """Return True if a chunk is intact; remove it if it is not."""
        try:
            data = await self._chunks.read(digest)
        except NotFound:
            return False
        if await asyncio.to_thread(digest_of, data) == digest:
            return True
        log.error("chunk_corrupt", chunk=digest, n_bytes=len(data))
        await self._chunks.remove({digest: math.inf})
        return False

    async def check_needed(self, digest: str, jobs: Sequence[JobVersions]) -> None:
        """Check that no retained version needs a chunk that the store lacks.

        Raises:
            StoreUnavailable: a version needs it: it must be uploaded again.

        """
        versions = {(job.job_id, version.digest): version for job in jobs for version in job.versions}
        self._needed = {name: chunks for name, chunks in self._needed.items() if name in versions}
        for (job_id, manifest_digest), version in versions.items():
            name = job_id, manifest_digest
            if name not in self._needed:
                data = await self._documents.manifest(job_id, version.version)
                manifest = await asyncio.to_thread(Manifest.decode, data)
                self._needed[name] = frozenset(chunk.digest for chunk in manifest.chunks())
            if digest in self._needed[name]:
                self._missing.add(digest)
                raise StoreUnavailable(
                    f"chunk {digest} of version {version.version} of job {job_id} is damaged or lost: the job's "
                    "trainer uploads it again while it has the weights of this version"
                )
