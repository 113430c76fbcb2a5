"""Serve the blobs of a cache to peers over HTTP; each request must prove that the client has the peer key."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Response
from fastapi.responses import FileResponse
from prometheus_client import Counter
from starlette.types import Message, Receive, Scope, Send

from rlboost.shared.errors import NotFound
from rlboost.shared.http.access import is_valid_signature
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.transfer_server import FoundFile, TransferRequest, TransferServer, transfer_limit_s
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.manifest import Digest
from rlboost.shared.weights.peers.source import BUSY_STATUS

_READ_BYTES = 1 << 20
_PATH = re.compile(r"/v1/chunks/([0-9a-f]{64})")


def digest_in(path: str) -> str:
    """Return the digest of the blob at this path of a URL, an empty string if it is something else."""
    found = _PATH.fullmatch(path)
    return found[1] if found else ""


class BlobResponse(FileResponse):
    """A blob's file, or the requested range of it; counts the bytes sent."""

    chunk_size = _READ_BYTES

    def __init__(self, path: Path, status: os.stat_result, digest: str, sent: Counter) -> None:
        """Respond with the file `path`; `status` is its stat result."""
        super().__init__(
            path, stat_result=status, media_type="application/octet-stream", headers={"ETag": f'"{digest}"'}
        )
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""

        async def counted(message: Message) -> None:
            await send(message)
            self._sent.inc(len(message.get("body", b"")))

        await super().__call__(scope, receive, counted)


MAX_CONCURRENT = 16
"""Concurrent uploads of one peer, which also runs an engine."""


def blob_transfers(cache: Cache, peer_key: str, sent: Counter, slots: asyncio.Semaphore) -> TransferServer:
    """Return the sender of whole verified blobs; `sent` counts bytes."""

    def find(request: TransferRequest) -> FoundFile | None:
        digest = digest_in(request.path)
        if digest not in cache.verified or not _is_proof(request.authorization, peer_key, digest):
            return None
        file = cache.open_to_send(digest)
        return FoundFile(file, digest) if file else None

    return TransferServer(find, sent, slots=slots)


def blob_routes(cache: Cache, peer_key: str, sent: Counter, slots: asyncio.Semaphore) -> APIRouter:
    """Return `GET /v1/chunks/{digest}` for verified blobs, for the requests that `blob_transfers` does not respond to.

    Args:
        cache: whose verified blobs are served.
        peer_key: a request must prove that its client has it.
        sent: counts bytes.
        slots: shared with `blob_transfers`.

    """

    async def check(digest: Digest, authorization: Annotated[str, Header()] = "") -> None:
        if not _is_proof(authorization, peer_key, digest):
            raise Problem(
                401, "Unauthorized", "send the header 'Authorization: Bearer <proof>' with the proof of this blob"
            )

    router = APIRouter(prefix="/v1/chunks", tags=["weights"], dependencies=[Depends(check)])

    @router.get("/{digest}", response_class=Response)
    async def get(digest: Digest) -> Response:
        if digest not in cache.verified:
            raise NotFound(f"this peer does not hold blob {digest}")
        if slots.locked():
            raise Problem(BUSY_STATUS, "Busy", f"{MAX_CONCURRENT} blobs are being sent: ask another peer")
        path = cache.path(digest)
        try:
            status = await asyncio.to_thread(os.stat, path)
        except FileNotFoundError as error:
            raise NotFound(f"this peer no longer holds blob {digest}") from error
        return _InSlot(slots, BlobResponse(path, status, digest, sent), transfer_limit_s(status.st_size))

    return router


def _is_proof(authorization: str, peer_key: str, digest: str) -> bool:
    return is_valid_signature(authorization.removeprefix("Bearer "), peer_key, "chunk", digest)


class _InSlot(Response):
    """A response that occupies a slot while it is sent, for a limited time."""

    def __init__(self, slots: asyncio.Semaphore, response: BlobResponse, limit_s: float) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._slots = slots
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._slots, asyncio.timeout(self._limit_s):
            await self._response(scope, receive, send)
