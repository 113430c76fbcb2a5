"""What a peer serves over HTTP: the blobs in its cache, each to whoever proves for it that he has the token."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Response
from prometheus_client import Counter
from starlette.types import Receive, Scope, Send

from shared.errors import NotFound
from shared.http import Problem
from shared.proof import is_proved
from shared.weights.cache import Cache
from shared.weights.manifest import Digest
from shared.weights.peers.transport import BUSY_STATUS
from shared.weights.serving import BlobResponse

AT_A_TIME = 16
"""Blobs that one peer sends at a time: it has an engine to run."""


def blob_routes(cache: Cache, token: str, sent: Counter) -> APIRouter:
    """Return `GET /v1/chunks/{digest}` for verified blobs; `sent` counts bytes."""

    async def check(digest: Digest, authorization: Annotated[str, Header()] = "") -> None:
        if not is_proved(authorization.removeprefix("Bearer "), token, "chunk", digest):
            raise Problem(
                401, "Unauthorized", "send the header 'Authorization: Bearer <proof>' with the proof of this blob"
            )

    router = APIRouter(prefix="/v1/chunks", tags=["weights"], dependencies=[Depends(check)])
    places = asyncio.Semaphore(AT_A_TIME)

    @router.get("/{digest}", response_class=Response)
    async def get(digest: Digest) -> Response:
        if digest not in cache.verified:
            raise NotFound(f"there is no blob {digest} here")
        if places.locked():
            raise Problem(BUSY_STATUS, "Busy", f"{AT_A_TIME} blobs are being sent: ask another peer")
        path = cache.path(digest)
        try:
            status = await asyncio.to_thread(os.stat, path)
        except FileNotFoundError as error:
            raise NotFound(f"there is no blob {digest} here any more") from error
        return _Placed(places, BlobResponse(path, status, digest, sent))

    return router


class _Placed(Response):
    """An answer that takes a place while it is sent."""

    def __init__(self, places: asyncio.Semaphore, answer: BlobResponse) -> None:
        super().__init__()
        self._places = places
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._places:
            await self._answer(scope, receive, send)
