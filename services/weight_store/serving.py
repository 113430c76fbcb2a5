"""Answers to who asks for a chunk: its file, the object store's address, or its bytes passed through."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import Counter

from services.weight_store.domain.ranges import requested
from services.weight_store.metrics import Metrics
from services.weight_store.ports import Elsewhere, InFile, Source, Through
from shared.http import Problem
from shared.weights.serving import BlobResponse

_MEDIA_TYPE = "application/octet-stream"


async def answer(source: Source, digest: str, request: Request, metrics: Metrics) -> Response:
    """Return the answer to a GET or HEAD of a chunk, with the range that was asked for.

    Raises:
        Problem: the range is beyond the chunk.
        StoreUnavailable: the object store does not answer.

    """
    if isinstance(source, InFile):
        return BlobResponse(source.path, source.status, digest, metrics.bytes_out)
    headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
    wanted = requested(request.headers.get("Range"), source.n_bytes)
    if request.method == "HEAD":
        return Response(media_type=_MEDIA_TYPE, headers={**headers, "Content-Length": str(source.n_bytes)})
    if wanted is None:
        unsatisfied = {"Content-Range": f"bytes */{source.n_bytes}"}
        raise Problem(416, "Range not satisfiable", f"the chunk has {source.n_bytes} bytes", headers=unsatisfied)
    if isinstance(source, Elsewhere):
        metrics.bytes_redirected.inc(len(wanted))
        return Response(status_code=307, headers={"Location": source.url, "Cache-Control": "no-store"})
    return await _passed_through(source, wanted, headers, metrics.bytes_out)


async def _passed_through(source: Through, wanted: range, headers: dict[str, str], sent: Counter) -> Response:
    headers["Content-Length"] = str(len(wanted))
    if len(wanted) < source.n_bytes:
        headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{source.n_bytes}"
    # Opened before the first byte of the answer leaves, so that a failure has its own status.
    blocks = await source.blocks(wanted.start, wanted.stop) if wanted else None

    async def counted() -> AsyncIterator[bytes]:
        if blocks is not None:
            async for block in blocks:
                yield block
                sent.inc(len(block))

    status = 206 if len(wanted) < source.n_bytes else 200
    return StreamingResponse(counted(), status, headers=headers, media_type=_MEDIA_TYPE)
