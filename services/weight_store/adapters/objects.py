"""Chunks and documents in an object store, and the lease that keeps it to one weight store."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import structlog
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from rlboost.services.weight_store.domain.versions import JobVersions, decode_model, encode_model
from rlboost.services.weight_store.ports import BadChunk, Proxied, Redirect, StagedPart
from rlboost.shared.bucket import Bucket, Changed, ExclusiveObject, StoredObject
from rlboost.shared.errors import ConfigError, Fenced, NotFound, Retryable, StoreUnavailable
from rlboost.shared.ids import new_token
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.manifest import ChunkRef

log = structlog.get_logger(__name__)

# --- A lease on a prefix of an object store: one process at a time writes to it ---------------------------------------
# The holder renews the lease by a conditional write of `owner.json` over its own last version. A process that finds
# another owner waits for the lease time that is in the document. If the document changed meanwhile, its owner is alive
# and the process gives up; otherwise it overwrites the document. Clocks of two machines are never compared.
#
# A paused holder finds its lease expired, stops writing, and is fenced at its next conditional write. All documents are
# written conditionally, so its late writes have no effect. Removals are unconditional: they are cancelled when the
# lease expires, some time before the next holder may start. A holder that is paused for that whole time between the
# check and the request could still remove chunks that were garbage during its own lease.


_PATH = "owner.json"
_SPARE_S = 60.0
"""Extra time, beyond the lease, for reading the owner document."""


class _Owner(BaseModel):
    model_config = ConfigDict(frozen=True)

    owner: str
    """Host and process id, for error messages."""
    run: str
    """Distinguishes runs of a process."""
    renewed: int
    """Number of renewals."""
    lease_s: float
    """Without a change for this time the owner counts as dead; 0 after a release."""


class Lease:
    """The exclusive right to write to a bucket; the loop `hold` renews it.

    `hold` consumes nothing and produces a renewal every third of the lease time. It waits for the object store, and
    ends at the stop, or with `Fenced` when another process has taken over.
    """

    def __init__(self, bucket: Bucket, document: ExclusiveObject, lease_s: float) -> None:
        """Use `acquire`."""
        self._bucket = bucket
        self._object = document
        self._lease_s = lease_s
        self._run = new_token(8)
        self._renewed = 0
        self._valid_until = 0.0

    @classmethod
    async def acquire(cls, bucket: Bucket, lease_s: float, waits: Waits) -> Self:
        """Acquire the lease; wait for the lease of a previous process to expire.

        Raises:
            ConfigError: another process holds the lease, or the server ignores write conditions.
            StoreUnavailable: the object store does not answer.

        """
        found = await _read(bucket)
        if found is not None:
            found = await _wait_until_expired(bucket, found, waits)
        lease = cls(bucket, ExclusiveObject(bucket, _PATH, found.version if found else None), lease_s)
        try:
            await lease._renew()
        except Fenced as error:
            raise ConfigError(f"object store {bucket.url} is in use by another process: {_ADVICE}") from error
        await lease._check_conditions()
        return lease

    def check(self) -> None:
        """Check that this process holds the lease.

        Raises:
            StoreUnavailable: the lease has expired; it may be renewed soon.

        """
        if not_ready_reason := self.not_ready_reason():
            raise StoreUnavailable(not_ready_reason)

    @asynccontextmanager
    async def within_lease(self) -> AsyncIterator[None]:
        """Cancel the body when the current lease expires.

        Raises:
            StoreUnavailable: the lease has expired, or expired during the body.

        """
        self.check()
        try:
            async with asyncio.timeout(self._valid_until - time.monotonic()):
                yield
        except TimeoutError as error:
            raise StoreUnavailable(f"object store {self._bucket.url} did not answer within the lease") from error

    def not_ready_reason(self) -> str | None:
        """Return why this process may not write now, None if it may."""
        if time.monotonic() < self._valid_until:
            return None
        return f"the lease on object store {self._bucket.url} could not be renewed in time"

    async def hold(self, stop: asyncio.Event) -> None:
        """Renew the lease until the stop.

        Raises:
            Fenced: another process has taken over.

        """
        interval_s = self._lease_s / 3
        while not stop.is_set():
            try:
                async with asyncio.timeout(interval_s):
                    await self._renew()
            except (Retryable, TimeoutError) as error:
                log.warning("lease_renewal_failed", store=self._bucket.url, error=str(error) or "no answer in time")
            await until_stop(stop, interval_s)

    async def release(self) -> None:
        """Release the lease, so that the next process need not wait, if the object store answers."""
        self._valid_until = 0.0
        try:
            async with asyncio.timeout(self._lease_s / 3):
                await self._object.write(self._document(0.0))
        except (Retryable, Fenced, TimeoutError) as error:
            log.warning("lease_release_failed", store=self._bucket.url, error=str(error) or "no answer in time")

    async def _renew(self) -> None:
        began = time.monotonic()
        self._renewed += 1
        await self._object.write(self._document(self._lease_s))
        # The next holder waits for the whole lease time.
        self._valid_until = began + self._lease_s * 2 / 3

    async def _check_conditions(self) -> None:
        try:
            await self._bucket.put_if_version(_PATH, self._document(self._lease_s), None)
        except Changed:
            return
        raise ConfigError(
            f"object store {self._bucket.url}: its server ignores conditional writes (If-None-Match: *), "
            "so two weight stores could corrupt it: use an object store that supports them"
        )

    def _document(self, lease_s: float) -> bytes:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        return _Owner(owner=owner, run=self._run, renewed=self._renewed, lease_s=lease_s).model_dump_json().encode()


_ADVICE = "stop it, or give each weight store its own prefix"


async def _read(bucket: Bucket) -> StoredObject | None:
    try:
        return await bucket.get(_PATH)
    except NotFound:
        return None


async def _wait_until_expired(bucket: Bucket, found: StoredObject, waits: Waits) -> StoredObject | None:
    """Wait until the lease of `found` has expired; return the current document."""
    holder = _decoded(bucket, found)
    if holder.lease_s == 0:
        return found
    log.info("lease_awaited", store=bucket.url, holder=holder.owner, lease_s=holder.lease_s)
    because = f"start on {bucket.url}"
    async with waits.on(f"the lease of {holder.owner}", because=because, limit_s=holder.lease_s + _SPARE_S):
        await asyncio.sleep(holder.lease_s)
        now = await _read(bucket)
    if now is not None and now.data != found.data and (living := _decoded(bucket, now)).lease_s:
        raise ConfigError(f"object store {bucket.url} is in use by {living.owner}: {_ADVICE}")
    return now


def _decoded(bucket: Bucket, found: StoredObject) -> _Owner:
    try:
        return _Owner.model_validate_json(found.data)
    except ValidationError as error:
        raise ConfigError(
            f"object store {bucket.url}: {_PATH} was not written by a weight store: use another prefix"
        ) from error


# --- Chunks and documents of the weight store in an object store ------------------------------------------------------
#     chunks/abcdef...              a chunk, named by its digest
#     models/JOB/model.json         the model: what is visible
#     models/JOB/manifests/7.json   manifest of version 7
#     models/JOB/edges/7.json       deltas that lead to the chunks of version 7
#     models/JOB/parts/7-0.json     rank 0's part of version 7, staged for the commit
#     owner.json                    the process that holds the lease: see `Lease`
#
# Every object is written atomically. The process that holds the lease keeps the time of a chunk's last use in memory:
# the time of an object cannot be set, and copying it onto itself would cost one request per chunk. Chunks found at
# start count as used at that moment, since the previous process may have reported them as present to a publisher.


_CHUNKS, _MODELS = "chunks", "models"
_STAGED_AT = "staged"


@dataclass(slots=True)
class _Held:
    n_bytes: int
    used_at: float


class ObjectChunks:
    """`ports.Chunks` in an object store.

    The list of chunks is cached in memory and refreshed from the object store at each garbage collection.
    """

    def __init__(self, bucket: Bucket, lease: Lease, began_at: float, *, redirect: bool) -> None:
        """Use `opened`, which lists the chunks."""
        self._bucket = bucket
        self._lease = lease
        self._started_at = began_at
        self._redirect = redirect
        self._held: dict[str, _Held] = {}
        self._uploading: dict[str, float] = {}
        """Digest -> start of uploads in progress or with an unknown outcome."""
        self._removing: set[str] = set()
        """Being removed, or with an unknown outcome: neither present nor accepted until the removal is confirmed."""

    @classmethod
    async def opened(cls, bucket: Bucket, lease: Lease, now: float, *, redirect: bool) -> Self:
        """List the chunks; all of them count as used now.

        Args:
            bucket: the object store.
            lease: held by this process.
            now: the time in Unix seconds.
            redirect: redirect readers of chunks to the object store.

        Raises:
            StoreUnavailable: the object store does not answer.

        """
        chunks = cls(bucket, lease, now, redirect=redirect)
        await chunks.last_used()
        return chunks

    async def sync(self) -> None:
        """See `Chunks.sync`: an object is durable once it is put."""

    async def put(self, digest: str, blocks: Sequence[bytes | memoryview], now: float) -> None:
        """See `Chunks.put`. The digest is checked before anything is sent."""
        data = await asyncio.to_thread(_verified, digest, blocks)
        self._lease.check()
        if digest in self._removing:
            raise StoreUnavailable(f"chunk {digest} is being removed as garbage")
        self._uploading[digest] = now
        if digest in self._held:
            self._held[digest].used_at = now
        await self._bucket.put(_chunk(digest), data)
        self._held[digest] = _Held(len(data), now)
        self._uploading.pop(digest, None)

    async def missing(self, chunks: Sequence[ChunkRef], now: float) -> list[str]:
        self._lease.check()
        missing = []
        for chunk in chunks:
            held = self._held.get(chunk.digest)
            if held is None or held.n_bytes != chunk.n_bytes or chunk.digest in self._removing:
                missing.append(chunk.digest)
            else:
                held.used_at = now
        return missing

    async def read(self, digest: str) -> bytes:
        try:
            return (await self._bucket.get(_chunk(digest))).data
        except NotFound as error:
            raise NotFound(f"there is no chunk {digest}") from error

    async def read_into(self, digest: str, buffer: bytearray) -> memoryview:  # noqa: ARG002 - the chunk is in memory in any case
        return memoryview(bytearray(await self.read(digest)))

    async def source(self, digest: str) -> Redirect | Proxied:
        held = self._held.get(digest)
        if held is None:
            raise NotFound(f"there is no chunk {digest}")
        if self._redirect:
            return Redirect(await self._bucket.link(_chunk(digest)), held.n_bytes)

        async def blocks(start: int, stop: int) -> AsyncIterator[bytes]:
            return await self._bucket.blocks(_chunk(digest), start, stop)

        return Proxied(held.n_bytes, blocks)

    async def n_bytes(self) -> int:
        """See `Chunks.n_bytes`. As of the last listing and the writes and removals since."""
        return sum(held.n_bytes for held in self._held.values())

    async def last_used(self) -> dict[str, float]:
        """See `Chunks.last_used`. Chunks that disappeared from the object store are dropped."""
        before = set(self._held)
        sizes = await self._bucket.sizes(_CHUNKS)
        for digest in before - sizes.keys():
            self._held.pop(digest, None)
        for digest, n_bytes in sizes.items():
            if digest in self._held:
                self._held[digest].n_bytes = n_bytes
            elif digest not in self._removing:
                self._held[digest] = _Held(n_bytes, self._uploading.pop(digest, self._started_at))
        return {digest: held.used_at for digest, held in self._held.items() if digest not in self._removing}

    async def remove(self, unused_since: Mapping[str, float]) -> None:
        """See `Chunks.remove`. Removals with an unknown outcome are repeated."""
        self._lease.check()
        self._removing |= {
            digest
            for digest, used_at in unused_since.items()
            if digest in self._held and self._held[digest].used_at <= used_at
        }
        if self._removing:
            async with self._lease.within_lease():
                await self._bucket.remove([_chunk(digest) for digest in sorted(self._removing)])
        for digest in self._removing:
            self._held.pop(digest, None)
        self._removing.clear()


class ObjectDocuments:
    """`ports.Documents` in an object store."""

    def __init__(self, bucket: Bucket, lease: Lease) -> None:
        self._bucket = bucket
        self._lease = lease
        self._models: dict[str, ExclusiveObject] = {}

    async def jobs(self) -> list[str]:
        return await self._bucket.folders(_MODELS)

    async def versions_of(self, job_id: str) -> JobVersions:
        try:
            found = await self._bucket.get(_model(job_id))
        except NotFound:
            self._models[job_id] = ExclusiveObject(self._bucket, _model(job_id), None)
            return JobVersions(job_id)
        self._models[job_id] = ExclusiveObject(self._bucket, _model(job_id), found.version)
        return decode_model(found.data)

    async def save_versions(self, job: JobVersions) -> None:
        """See `Documents.save_versions`. A compare-and-set against the version that this process read or wrote last."""
        self._lease.check()
        stored = self._models.setdefault(job.job_id, ExclusiveObject(self._bucket, _model(job.job_id), None))
        await stored.write(encode_model(job))

    async def put_manifest(self, job_id: str, version: int, data: bytes) -> None:
        await self._write(_manifest(job_id, version), data)

    async def manifest(self, job_id: str, version: int) -> bytes:
        return (await self._bucket.get(_manifest(job_id, version))).data

    async def remove_manifest(self, job_id: str, version: int) -> None:
        await self._remove(_manifest(job_id, version))

    async def put_edges(self, job_id: str, version: int, data: bytes) -> None:
        await self._write(_edges(job_id, version), data)

    async def edges(self, job_id: str, version: int) -> bytes:
        return (await self._bucket.get(_edges(job_id, version))).data

    async def edge_versions(self, job_id: str) -> list[int]:
        names = await self._bucket.sizes(f"{_MODELS}/{job_id}/edges")
        return sorted(int(name.removesuffix(".json")) for name in names)

    async def remove_edges(self, job_id: str, version: int) -> None:
        await self._remove(_edges(job_id, version))

    async def put_part(self, job_id: str, part: StagedPart, data: bytes) -> None:
        await self._write(_part(job_id, part.version, part.rank), data, {_STAGED_AT: repr(part.staged_at)})

    async def part(self, job_id: str, version: int, rank: int) -> bytes:
        return (await self._bucket.get(_part(job_id, version, rank))).data

    async def parts(self, job_id: str) -> list[StagedPart]:
        found = []
        for name in await self._bucket.sizes(f"{_MODELS}/{job_id}/parts"):
            version, _, rank = name.removesuffix(".json").partition("-")
            metadata = await self._bucket.metadata(_part(job_id, int(version), int(rank)))
            found.append(StagedPart(int(version), int(rank), float(metadata.get(_STAGED_AT, 0.0))))
        return sorted(found, key=lambda part: (part.version, part.rank))

    async def remove_part(self, job_id: str, part: StagedPart) -> None:
        await self._remove(_part(job_id, part.version, part.rank))

    async def _write(self, path: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        self._lease.check()
        await self._bucket.replace(path, data, metadata)

    async def _remove(self, path: str) -> None:
        self._lease.check()
        await self._bucket.remove([path])


def _verified(digest: str, blocks: Sequence[bytes | memoryview]) -> bytes:
    data = b"".join(blocks)
    found = blake3(data).hexdigest()
    if found != digest:
        raise BadChunk(f"the bytes have the digest {found}, not {digest}: send them again")
    return data


def _chunk(digest: str) -> str:
    return f"{_CHUNKS}/{digest}"


def _model(job_id: str) -> str:
    return f"{_MODELS}/{job_id}/model.json"


def _manifest(job_id: str, version: int) -> str:
    return f"{_MODELS}/{job_id}/manifests/{version}.json"


def _edges(job_id: str, version: int) -> str:
    return f"{_MODELS}/{job_id}/edges/{version}.json"


def _part(job_id: str, version: int, rank: int) -> str:
    return f"{_MODELS}/{job_id}/parts/{version}-{rank}.json"
