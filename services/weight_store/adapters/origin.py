"""Where the weights are kept: a folder, or an object store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import structlog

from services.weight_store.adapters.disk import Directory, DiskChunks, DiskDocuments
from services.weight_store.adapters.lease import Lease
from services.weight_store.adapters.objects import ObjectChunks, ObjectDocuments
from services.weight_store.ports import Chunks, Documents
from shared.bucket import SCHEMES, Bucket, configuration
from shared.errors import ConfigError, Fatal, StoreUnavailable
from shared.lifecycle import Loop
from shared.waiting import Waits

log = structlog.get_logger(__name__)

_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Origin:
    """The ports, open, and what their owner must do meanwhile."""

    chunks: Chunks
    documents: Documents
    loops: Mapping[str, Loop] = field(default_factory=dict)
    lack: Callable[[], str | None] = lambda: None
    """Why nothing can be written just now."""


@asynccontextmanager
async def opened(
    url: str,
    directory: Path,
    waits: Waits,
    *,
    lease_s: float,
    redirect: Literal["auto", "off"],
    clock: Callable[[], float],
) -> AsyncIterator[Origin]:
    """Open the origin that `url` names, `directory` where it is empty, for this process alone.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder` or `memory:///`.
        directory: the folder where there is no URL.
        waits: where the wait for a predecessor's lease is shown.
        lease_s: an object store's writer that is silent for so long may be succeeded.
        redirect: `auto` sends readers to the object store where that can be.
        clock: gives Unix seconds.

    Raises:
        ConfigError: it cannot be used, or another process uses it.
        StoreUnavailable: the object store does not answer.

    """
    scheme = urlsplit(url).scheme
    if not url or scheme == "file":
        folder = Directory(_folder(url) if url else directory)
        try:
            yield Origin(DiskChunks(folder), DiskDocuments(folder))
        finally:
            folder.close()
        return
    if scheme not in SCHEMES:
        raise ConfigError(f"origin {url!r}: give s3://bucket/prefix, gs://, az:// or file:///folder")
    bucket = Bucket(url)
    with configuration():
        lease = await Lease.take(bucket, lease_s, waits)
    try:
        with configuration():
            # The lease has tried to read and to write.
            await bucket.sizes(_PROBE)
            await bucket.remove([_PROBE])
        links = redirect == "auto" and await _has_links(bucket)
        # After the lease was taken: until then another process may have made promises.
        chunks = await ObjectChunks.opened(bucket, lease, clock(), redirect=links)
        log.info("origin_opened", store=url, redirect=links)
        yield Origin(chunks, ObjectDocuments(bucket, lease), {"lease": lease.hold}, lease.lack)
    finally:
        await lease.release()


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"origin {url!r}: a folder is file:///and/its/path")
    return Path(unquote(parts.path))


async def _has_links(bucket: Bucket) -> bool:
    try:
        await bucket.link(_PROBE)
    except (Fatal, StoreUnavailable) as error:
        log.warning("no_signed_urls", store=bucket.url, error=str(error))
        return False
    return True
