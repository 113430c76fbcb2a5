"""Open the storage of the weights: a local folder or an object store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import unquote, urlsplit

import structlog

from rlboost.services.weight_store.adapters.disk import DiskChunks, DiskDocuments, StoreDirectory
from rlboost.services.weight_store.adapters.objects import Lease, ObjectChunks, ObjectDocuments
from rlboost.services.weight_store.ports import Chunks, Documents
from rlboost.shared.bucket import SCHEMES, Bucket, configuration
from rlboost.shared.errors import ConfigError, Fatal, StoreUnavailable
from rlboost.shared.process.lifecycle import Loop
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.rest_models import ChunkDirectory

log = structlog.get_logger(__name__)

_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Origin:
    """The open ports, and the loops to run while they are open."""

    chunks: Chunks
    documents: Documents
    loops: Mapping[str, Loop] = field(default_factory=dict)
    not_ready_reason: Callable[[], str | None] = lambda: None
    """Returns why nothing can be written now, or None."""
    open_chunk: Callable[[str], BinaryIO | None] | None = None
    """Opens the file of a chunk, None if there is none; absent if chunks are not files. Blocks on files."""
    directory: ChunkDirectory | None = None
    """Where chunks are, if they are files."""


@asynccontextmanager
async def open_origin(
    url: str,
    directory: Path,
    waits: Waits,
    *,
    lease_s: float,
    redirect: Literal["auto", "off"],
    clock: Callable[[], float],
) -> AsyncIterator[Origin]:
    """Open the origin at `url`, or `directory` if the URL is empty, exclusively for this process.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder` or `memory:///`.
        directory: the folder to use without a URL.
        waits: registry in which the wait for a previous lease is listed.
        lease_s: lease time on an object store.
        redirect: `auto` redirects readers to the object store if it can sign URLs.
        clock: returns Unix seconds.

    Raises:
        ConfigError: the origin is invalid or not writable, or another process uses it.
        StoreUnavailable: the object store does not answer.

    """
    scheme = urlsplit(url).scheme
    if not url or scheme == "file":
        folder = StoreDirectory(_folder(url) if url else directory)
        try:
            chunks = DiskChunks(folder)
            yield Origin(chunks, DiskDocuments(folder), open_chunk=chunks.open, directory=folder.shared)
        finally:
            folder.close()
        return
    if scheme not in SCHEMES:
        raise ConfigError(f"origin {url!r}: use s3://bucket/prefix, gs://, az:// or file:///folder")
    bucket = Bucket(url)
    with configuration():
        lease = await Lease.acquire(bucket, lease_s, waits)
    try:
        with configuration():
            # The lease has tested reading and writing; this tests listing and removing.
            await bucket.sizes(_PROBE)
            await bucket.remove([_PROBE])
        links = redirect == "auto" and await _has_links(bucket)
        # After the lease was acquired: until then another process may have reported chunks as present.
        objects = await ObjectChunks.opened(bucket, lease, clock(), redirect=links)
        log.info("origin_opened", store=url, redirect=links)
        yield Origin(objects, ObjectDocuments(bucket, lease), {"lease": lease.hold}, lease.not_ready_reason)
    finally:
        await lease.release()


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"origin {url!r}: use file:///path for a folder")
    return Path(unquote(parts.path))


async def _has_links(bucket: Bucket) -> bool:
    try:
        await bucket.link(_PROBE)
    except (Fatal, StoreUnavailable) as error:
        log.warning("signed_urls_unavailable", store=bucket.url, error=str(error))
        return False
    return True
