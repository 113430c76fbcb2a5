"""The weight store's HTTP API. Sizes are in bytes; digests are BLAKE3 in hexadecimal and serve as `ETag`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from rlboost.services.weight_store.app import WeightStore
from rlboost.services.weight_store.chunk_response import chunk_response
from rlboost.services.weight_store.domain.versions import Model, Version
from rlboost.services.weight_store.metrics import Metrics
from rlboost.services.weight_store.ports import StoreFull
from rlboost.shared.http.guard import guarded_router
from rlboost.shared.http.problem import PROBLEM, Problem
from rlboost.shared.http.server import create_app
from rlboost.shared.waiting import Waits
from rlboost.shared.weights.manifest import CHUNK_BYTES, Digest, JobId
from rlboost.shared.weights.wire import (
    ChunkList,
    ChunkState,
    CommitRequest,
    MissingChunks,
    ModelInfo,
    ModelList,
    VersionInfo,
)

Number = Annotated[int, PathParameter(ge=0)]


def create(
    store: WeightStore, *, token: str, ready: Callable[[], str | None], waits: Waits, metrics: Metrics
) -> FastAPI:
    """Return the service's app; `ready` returns why the origin is not ready, or None."""
    app = create_app("RLBoost weight store", token=token, ready=ready, waits=waits)
    chunks = guarded_router(token, prefix="/v1/chunks", tags=["chunks"])
    _add_chunks(chunks, store, metrics)
    models = guarded_router(token, prefix="/v1/models", tags=["models"])
    _add_versions(models, store)
    _add_publishing(models, store)
    app.include_router(chunks)
    app.include_router(models)

    @app.exception_handler(StoreFull)
    async def _(_: Request, error: StoreFull) -> JSONResponse:
        body = {"type": "about:blank", "title": "Insufficient storage", "status": 507, "detail": str(error)}
        return JSONResponse(body, 507, media_type=PROBLEM)

    return app


def _add_chunks(router: APIRouter, store: WeightStore, metrics: Metrics) -> None:
    @router.get("/damaged")
    async def damaged() -> MissingChunks:
        return MissingChunks(missing=tuple(store.damaged.lacking()))

    @router.post("/{digest}/verify")
    async def verify(digest: Digest) -> ChunkState:
        return ChunkState(intact=await store.damaged.verify(digest))

    @router.put("/{digest}", status_code=204)
    async def put(digest: Digest, request: Request) -> None:
        blocks = await _body(request)
        await store.put_chunk(digest, blocks)
        metrics.bytes_in.inc(sum(map(len, blocks)))

    @router.head("/{digest}")
    @router.get("/{digest}", response_class=Response)
    async def get(digest: Digest, request: Request) -> Response:
        return await chunk_response(await store.source(digest), digest, request, metrics)

    @router.post("/missing")
    async def missing(body: ChunkList) -> MissingChunks:
        return MissingChunks(missing=tuple(await store.missing(body.chunks)))


def _add_versions(router: APIRouter, store: WeightStore) -> None:
    @router.get("")
    async def models() -> ModelList:
        return ModelList(models=tuple(map(_model_info, store.models())))

    @router.get("/{job_id}")
    async def model(job_id: JobId) -> ModelInfo:
        return _model_info(store.model(job_id))

    @router.get("/{job_id}/head")
    async def head(job_id: JobId) -> VersionInfo:
        model = store.model(job_id)
        return _version_info(model, model.versions[-1])

    @router.get("/{job_id}/versions/{version}")
    async def manifest(job_id: JobId, version: Number) -> Response:
        data, digest = await store.manifest(job_id, version)
        return Response(data, media_type="application/json", headers={"ETag": f'"{digest}"'})

    @router.get("/{job_id}/versions/{version}/edges")
    async def edges(job_id: JobId, version: Number) -> Response:
        return Response(await store.edges(job_id, version), media_type="application/json")

    @router.get("/{job_id}/versions/{version}/route")
    async def route(job_id: JobId, version: Number, have: int = -1) -> Response:
        return Response(await store.route(job_id, version, have), media_type="application/json")


def _add_publishing(router: APIRouter, store: WeightStore) -> None:
    @router.put("/{job_id}/versions/{version}/parts/{rank}", status_code=204)
    async def put_part(job_id: JobId, version: Number, rank: Number, request: Request) -> None:
        await store.put_part(job_id, version, rank, await request.body())

    @router.post("/{job_id}/versions/{version}/commit")
    async def commit(job_id: JobId, version: Number, body: CommitRequest) -> VersionInfo:
        committed = await store.commit(job_id, version, body)
        return _version_info(store.model(job_id), committed)

    @router.post("/{job_id}/versions/{version}/pin", status_code=204)
    async def pin(job_id: JobId, version: Number) -> None:
        await store.pin(job_id, version)

    @router.delete("/{job_id}/versions/{version}/pin", status_code=204)
    async def unpin(job_id: JobId, version: Number) -> None:
        await store.unpin(job_id, version)


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


def _model_info(model: Model) -> ModelInfo:
    return ModelInfo(job_id=model.job_id, versions=tuple(_version_info(model, version) for version in model.versions))


def _version_info(model: Model, version: Version) -> VersionInfo:
    return VersionInfo(
        version=version.version,
        digest=version.digest,
        n_bytes=version.n_bytes,
        committed_at=version.committed_at,
        pinned=version.version in model.pins,
        delta_bytes=version.delta_bytes,
    )
