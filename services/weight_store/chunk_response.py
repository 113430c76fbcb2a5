"""Respond to a request for a chunk: with its file, a redirect to the object store, or its proxied bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import Counter

from rlboost.services.weight_store.domain.ranges import parse_range
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import ChunkLocation, LocalFile, Proxied, Redirect
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.transfer_server import Find, FoundFile, TransferRequest
from rlboost.shared.weights.transfer.blob_response import BlobResponse, digest_in

_MEDIA_TYPE = "application/octet-stream"


def find_chunk(open_chunk: Callable[[str], BinaryIO | None] | None, authorized: Callable[[str], bool]) -> Find:
    """Return what `TransferServer` needs for whole chunks.

    Args:
        open_chunk: see `Origin.open_chunk`.
        authorized: returns True if a request with this `Authorization` header may read chunks.

    """

    def find(request: TransferRequest) -> FoundFile | None:
        digest = digest_in(request.path)
        file = open_chunk(digest) if open_chunk and digest and authorized(request.authorization) else None
        return FoundFile(file, digest) if file else None

    return find


async def chunk_response(source: ChunkLocation, digest: str, request: Request, metrics: Metrics) -> Response:
    """Return the response to a GET or HEAD of a chunk, limited to the requested range.

    Raises:
        Problem: the range starts after the end of the chunk.
        StoreUnavailable: the object store does not answer.

    """
    if isinstance(source, LocalFile):
        return BlobResponse(source.path, source.status, digest, metrics.bytes_out)
    headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
    requested = parse_range(request.headers.get("Range"), source.n_bytes)
    if request.method == "HEAD":
        return Response(media_type=_MEDIA_TYPE, headers={**headers, "Content-Length": str(source.n_bytes)})
    if requested is None:
        unsatisfied = {"Content-Range": f"bytes */{source.n_bytes}"}
        raise Problem(416, "Range not satisfiable", f"the chunk has {source.n_bytes} bytes", headers=unsatisfied)
    if isinstance(source, Redirect):
        metrics.bytes_redirected.inc(len(requested))
        return Response(status_code=307, headers={"Location": source.url, "Cache-Control": "no-store"})
    return await _proxied(source, requested, headers, metrics.bytes_out)


async def _proxied(source: Proxied, requested: range, headers: dict[str, str], sent: Counter) -> Response:
    headers["Content-Length"] = str(len(requested))
    if len(requested) < source.n_bytes:
        headers["Content-Range"] = f"bytes {requested.start}-{requested.stop - 1}/{source.n_bytes}"
    # Opened before the response starts, so that a failure has its own status code.
    blocks = await source.blocks(requested.start, requested.stop) if requested else None

    async def counted() -> AsyncIterator[bytes]:
        if blocks is not None:
            async for block in blocks:
                yield block
                sent.inc(len(block))

    status = 206 if len(requested) < source.n_bytes else 200
    return StreamingResponse(counted(), status, headers=headers, media_type=_MEDIA_TYPE)
