"""The weight store's HTTP API. Sizes are in bytes; digests are BLAKE3 in hexadecimal and serve as `ETag`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, BinaryIO

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import Counter
from starlette.requests import ClientDisconnect

from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.domain.versions import JobVersions, Version, parse_range
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import ChunkLocation, LocalFile, Proxied, Redirect, StoreFull
from rlboost.shared.errors import NotFound
from rlboost.shared.http.access import Publishing, needs
from rlboost.shared.http.guard import Guard, principal_of
from rlboost.shared.http.problem import GUARDED_ERRORS, PROBLEM, Problem, problems, success
from rlboost.shared.http.server import create_app
from rlboost.shared.http.transfer_server import BodyReceiver, Find, FoundFile, TransferRequest
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.manifest import CHUNK_BYTES, Digest, JobId
from rlboost.shared.weights.peers.blob_routes import BlobResponse, digest_in
from rlboost.shared.weights.rest_models import (
    ChunkDirectory,
    ChunkList,
    ChunkState,
    CommitRequest,
    EdgeBatch,
    MissingChunks,
    ModelInfo,
    ModelList,
    VersionInfo,
)

# --- Respond to a request for a chunk: with its file, a redirect to the object store, or its proxied bytes ------------


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


# --- Receives uploads of chunks in threads, without passing through the ASGI app --------------------------------------


def chunk_receiver(store: WeightStore, metrics: Metrics, authorized: Callable[[str], bool]) -> BodyReceiver:
    """Return the receiver of plain uploads of chunks; `authorized` takes their `Authorization` header."""

    def accepts(path: str, authorization: str) -> bool:
        return bool(digest_in(path)) and authorized(authorization)

    async def put(path: str, body: memoryview) -> None:
        await store.put_chunk(digest_in(path), [body])
        metrics.bytes_in.inc(len(body))

    return BodyReceiver(accepts, put, max_bytes=CHUNK_BYTES)


# --- Routes -----------------------------------------------------------------------------------------------------------


Number = Annotated[int, PathParameter(ge=0)]
_CHUNK = (
    success(_MEDIA_TYPE)
    | success(_MEDIA_TYPE, "the requested range", 206)
    | {307: {"description": "the chunk is in the object store, at the address in `Location`"}}
    | problems(404, 416)
)


def create(
    store: WeightStore,
    *,
    guard: Guard,
    not_ready_reason: Callable[[], str | None],
    waits: Waits,
    metrics: Metrics,
    directory: ChunkDirectory | None = None,
) -> FastAPI:
    """Return the service's app.

    Args:
        store: the models.
        guard: checks every request.
        not_ready_reason: returns why the origin is not ready, or None.
        waits: shown by `/readyz`.
        metrics: the service's metrics.
        directory: where chunks are, None if they are not files.

    """
    app = create_app("RLBoost weight store", guard=guard, not_ready_reason=not_ready_reason, waits=waits)
    chunks = guard.router(prefix="/v1/chunks", tags=["chunks"], responses=GUARDED_ERRORS)
    _add_chunks(chunks, store, metrics)
    lists = guard.router(prefix="/v1", tags=["chunks"], responses=GUARDED_ERRORS)
    _add_chunk_lists(lists, store, directory)
    models = guard.router(prefix="/v1/models", tags=["models"], responses=GUARDED_ERRORS | problems(404, 409))
    _add_versions(models, store)
    _add_publishing(models, store)
    app.include_router(chunks)
    app.include_router(lists)
    app.include_router(models)

    @app.exception_handler(StoreFull)
    async def _(_: Request, error: StoreFull) -> JSONResponse:
        body = {"type": "about:blank", "title": "Insufficient storage", "status": 507, "detail": str(error)}
        return JSONResponse(body, 507, media_type=PROBLEM)

    return app


def _add_chunks(router: APIRouter, store: WeightStore, metrics: Metrics) -> None:
    @router.post("/{digest}/verify", responses=problems(404))
    @needs("weights")
    async def verify(digest: Digest) -> ChunkState:
        """Compare a chunk with its digest, and remove it if it is damaged."""
        return ChunkState(intact=await store.damaged.verify(digest))

    @router.put("/{digest}", status_code=204, responses=problems(507))
    @needs("publish")
    async def put(digest: Digest, request: Request) -> None:
        blocks = await _body(request)
        await store.put_chunk(digest, blocks)
        metrics.bytes_in.inc(sum(map(len, blocks)))

    @router.head("/{digest}", responses=_CHUNK)
    @router.get("/{digest}", response_class=Response, responses=_CHUNK)
    @needs("weights")
    async def get(digest: Digest, request: Request) -> Response:
        return await chunk_response(await store.source(digest), digest, request, metrics)

    @router.post("/missing")
    @needs("publish")
    async def missing(body: ChunkList) -> MissingChunks:
        return MissingChunks(missing=tuple(await store.missing(body.chunks)))

    @router.post("/apply")
    @needs("publish")
    async def apply(body: EdgeBatch) -> MissingChunks:
        """Derive chunks from uploaded deltas; return those that cannot be derived, to be uploaded whole."""
        return MissingChunks(missing=tuple(await store.apply(body.edges)))


def _add_chunk_lists(router: APIRouter, store: WeightStore, directory: ChunkDirectory | None) -> None:
    @router.get("/chunk-directory", responses=problems(404))
    @needs("weights")
    async def chunk_directory() -> ChunkDirectory:
        """Return where chunks are, for clients on the same file system; 404 if they are in an object store."""
        if directory is None:
            raise NotFound("the chunks of this weight store are not files")
        return directory

    @router.get("/damaged-chunks")
    async def damaged() -> MissingChunks:
        """Return the chunks that retained versions need and that are damaged or lost."""
        return MissingChunks(missing=tuple(store.damaged.missing()))


def _add_versions(router: APIRouter, store: WeightStore) -> None:
    @router.get("")
    @needs("weights")
    async def models() -> ModelList:
        return ModelList(models=tuple(map(_model_info, store.all_versions())))

    @router.get("/{job_id}")
    @needs("weights")
    async def model(job_id: JobId) -> ModelInfo:
        return _model_info(store.versions_of(job_id))

    @router.delete("/{job_id}", status_code=204)
    async def delete(job_id: JobId) -> None:
        """Delete all versions of an ended job."""
        await store.delete(job_id)

    @router.get("/{job_id}/head")
    @needs("publish")
    async def head(job_id: JobId, request: Request) -> VersionInfo:
        _epoch_on(job_id, request)
        job = store.versions_of(job_id)
        return _version_info(job, job.versions[-1])

    @router.get("/{job_id}/versions/{version}")
    @needs("weights")
    async def manifest(job_id: JobId, version: Number) -> Response:
        data, digest = await store.manifest(job_id, version)
        return Response(data, media_type="application/json", headers={"ETag": f'"{digest}"'})

    @router.get("/{job_id}/versions/{version}/route")
    @needs("weights")
    async def route(job_id: JobId, version: Number, have: int = -1) -> Response:
        return Response(await store.route(job_id, version, have), media_type="application/json")


def _add_publishing(router: APIRouter, store: WeightStore) -> None:
    @router.put("/{job_id}/versions/{version}/parts/{rank}", status_code=204, responses=problems(507))
    @needs("publish")
    async def put_part(job_id: JobId, version: Number, rank: Number, request: Request) -> None:
        epoch = _epoch_on(job_id, request)
        await store.put_part(job_id, version, rank, await request.body(), epoch)

    @router.post("/{job_id}/versions/{version}/commit", responses=problems(507))
    @needs("publish")
    async def commit(job_id: JobId, version: Number, body: CommitRequest, request: Request) -> VersionInfo:
        if (epoch := _epoch_on(job_id, request)) is not None:
            body = body.model_copy(update={"epoch": epoch})
        committed = await store.commit(job_id, version, body)
        return _version_info(store.versions_of(job_id), committed)

    @router.post("/{job_id}/versions/{version}/pin", status_code=204)
    async def pin(job_id: JobId, version: Number) -> None:
        await store.pin(job_id, version)

    @router.delete("/{job_id}/versions/{version}/pin", status_code=204)
    async def unpin(job_id: JobId, version: Number) -> None:
        await store.unpin(job_id, version)


def _epoch_on(job_id: str, request: Request) -> int | None:
    """Return the epoch of an external trainer that publishes, None for other clients.

    Raises:
        Problem: 403, its credential is for another job.

    """
    principal = principal_of(request)
    if principal.scope != "publish":
        return None
    publishing = Publishing.parse(principal.subject)
    if publishing.job_id != job_id:
        raise Problem(403, "Forbidden", f"this credential publishes weights of job {publishing.job_id} only")
    return publishing.epoch


async def _body(request: Request) -> list[bytes]:
    blocks, n_bytes = [], 0
    try:
        async for block in request.stream():
            blocks.append(block)
            n_bytes += len(block)
            if n_bytes > CHUNK_BYTES:
                raise Problem(413, "Too large", f"a chunk has at most {CHUNK_BYTES} bytes: split it")
    except ClientDisconnect as error:
        raise Problem(400, "Incomplete", "the connection closed before the end of the chunk: send it again") from error
    return blocks


def _model_info(job: JobVersions) -> ModelInfo:
    return ModelInfo(job_id=job.job_id, versions=tuple(_version_info(job, version) for version in job.versions))


def _version_info(job: JobVersions, version: Version) -> VersionInfo:
    return VersionInfo(
        version=version.version,
        digest=version.digest,
        n_bytes=version.n_bytes,
        committed_at=version.committed_at,
        pinned=version.version in job.pins,
        delta_bytes=version.delta_bytes,
        base_version=version.base,
    )
