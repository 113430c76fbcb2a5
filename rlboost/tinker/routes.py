"""The routes of Tinker's API that `rlboost tinker` answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from rlboost.gateway.gateway import Refused
from rlboost.gateway.vllm_routes import guarded_app
from rlboost.shared.errors import ConfigError, RLBoostError
from rlboost.shared.validation import describe
from rlboost.tinker.server import Result, Tinker, model_id_of
from rlboost.tinker.wire import (
    VERSION,
    CreateModel,
    CreateSampler,
    CreateSession,
    Heartbeat,
    LoadState,
    OfModel,
    OptimStep,
    Retrieve,
    Sample,
    SaveForSampler,
    SaveState,
    forward_backward_of,
)

_Model = TypeVar("_Model", bound=BaseModel)

API_KEY = "RLBOOST_TINKER_API_KEY"
KEY_PREFIX = "tml-"
"""The client sends no other keys."""
DOLLARS = "X-RLBoost-Dollars"
"""Header of a result: what the request has cost."""
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
    # Samples wait while the fleet has no worker.
    "sample_enable_stuck_detection": False,
}
"""What the client is to do, where it can do several things."""


def create_app(tinker: Tinker, api_key: str = "", host: str = "127.0.0.1") -> FastAPI:
    """Return the app.

    Args:
        tinker: what it serves.
        api_key: which requests need; without one, only those of this machine are accepted.
        host: where it listens.

    """

    def status_of(error: RLBoostError) -> int:
        return 422 if isinstance(error, ConfigError) else 503

    app = guarded_app(tinker.running, status_of, api_key, host, API_KEY)
    _add_service(app, tinker)
    _add_sessions(app, tinker)
    _add_in_order(app, tinker)
    _add_models(app, tinker)
    _add_checkpoints(app, tinker)

    @app.api_route("/api/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def unknown(path: str) -> None:
        # The client sends what fails with 501 again and again.
        raise Refused(404, f"/api/{path} is not supported by rlboost tinker: see docs/tinker.md for what is")

    return app


async def _given(request: Request, model: type[_Model]) -> _Model:
    return _read(model, await request.body())


def _read(model: type[_Model], body: bytes) -> _Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = "; ".join(describe(error, model))
        raise ConfigError(f"wrong, or not supported by rlboost tinker: {found}") from error


def _add_service(app: FastAPI, tinker: Tinker) -> None:
    @app.get("/api/v1/healthz")
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        length = tinker.model.context
        model = {"model_name": tinker.name, "max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    @app.post("/api/v1/client/config")
    async def config() -> dict[str, Any]:
        return _CLIENT_CONFIG

    @app.post("/api/v1/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": False}

    @app.post("/api/v1/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}


def _add_sessions(app: FastAPI, tinker: Tinker) -> None:
    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        given = (await _given(request, CreateSession)).sdk_version
        differs = f"rlboost tinker is written for tinker {VERSION}, and this is {given}: some calls may be rejected"
        warning = None if given.startswith(f"{VERSION}.") else differs
        return {"type": "create_session", "session_id": tinker.begin_session(), "warning_message": warning}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, str]:
        tinker.beat((await _given(request, Heartbeat)).session_id)
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str) -> dict[str, str]:
        await tinker.end_session(session_id)
        return {}

    @app.post("/api/v1/retrieve_future")
    async def retrieve(request: Request) -> Response:
        request_id = (await _given(request, Retrieve)).request_id
        result = await tinker.result(request_id)
        if result is None:
            waits = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(waits)
        headers = {} if result.dollars is None else {DOLLARS: f"{result.dollars:.9f}"}
        content = result.content if isinstance(result.content, bytes) else json.dumps(result.content)
        return Response(content, media_type=result.media_type, headers=headers)


def _add_in_order(app: FastAPI, tinker: Tinker) -> None:
    """Add the requests of a model that are executed one after the other.

    What is wrong with one fails its result: without it, those that follow would wait for it.
    """

    def submit(model_id: str, seq_id: int, body: bytes, work: Callable[[str], Awaitable[Result]]) -> dict[str, str]:
        tinker.model_of(model_id)
        request_id = tinker.submit(f"{model_id}:{seq_id}", body, lambda: tinker.in_turn(model_id, seq_id, work))
        return {"request_id": request_id, "model_id": model_id}

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, str]:
        body = await request.body()
        asked = forward_backward_of(body)
        return submit(asked.model_id, asked.seq_id, body, lambda adapter: tinker.forward_backward(adapter, asked))

    def add(path: str, model: type[_Model], work: Callable[[str, _Model], Awaitable[Result]]) -> None:
        async def route(request: Request) -> dict[str, str]:
            body = await request.body()
            order = _read(_Order, body)
            return submit(order.model_id, order.seq_id, body, lambda adapter: work(adapter, _read(model, body)))

        app.post(path)(route)

    add("/api/v1/optim_step", OptimStep, tinker.step)
    add("/api/v1/save_weights", SaveState, tinker.save_state)
    add("/api/v1/save_weights_for_sampler", SaveForSampler, tinker.save_for_sampler)

    @app.post("/api/v1/load_weights")
    async def load_weights(request: Request) -> dict[str, str]:
        body = await request.body()
        asked = _read(LoadState, body)
        if asked.model_id is not None and asked.seq_id is not None:
            return submit(asked.model_id, asked.seq_id, body, lambda _: tinker.load(asked))
        model_id = model_id_of(asked.session_id or "", asked.model_seq_id or 0)
        return {"request_id": tinker.submit(f"{model_id}:0", body, lambda: tinker.load(asked)), "model_id": model_id}


class _Order(BaseModel):
    model_id: str
    seq_id: int


def _add_models(app: FastAPI, tinker: Tinker) -> None:
    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> dict[str, str]:
        asked = await _given(request, CreateModel)
        tinker.beat(asked.session_id)
        model_id = model_id_of(asked.session_id, asked.model_seq_id)
        body = await request.body()
        return {"request_id": tinker.submit(f"{model_id}:0", body, lambda: tinker.create_model(asked))}

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        return tinker.info((await _given(request, OfModel)).model_id)

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, str]:
        sampler_id = tinker.create_sampler(await _given(request, CreateSampler))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    @app.get("/api/v1/samplers/{sampler_id}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        path = tinker.sampler(sampler_id).path
        return {"sampler_id": sampler_id, "base_model": tinker.name, "model_path": path}

    @app.post("/api/v1/asample")
    async def sample(request: Request) -> dict[str, Any]:
        asked = await _given(request, Sample)
        tinker.sampler(asked.sampling_session_id)
        request_id = f"{asked.sampling_session_id}:{asked.seq_id}"
        tinker.submit(request_id, await request.body(), lambda: tinker.sample(asked))
        ids = [f"{request_id}:{i}" for i in range(asked.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}


def _add_checkpoints(app: FastAPI, tinker: Tinker) -> None:
    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        class Path(BaseModel):
            tinker_path: str

        return tinker.weights_info((await _given(request, Path)).tinker_path)

    @app.get("/api/v1/training_runs/{model_id}/checkpoints")
    async def of_run(model_id: str) -> dict[str, Any]:
        return {"checkpoints": tinker.checkpoints(model_id)}

    @app.get("/api/v1/checkpoints")
    async def of_all(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = tinker.checkpoints()
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    @app.delete("/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}")
    async def delete(model_id: str, kind: str, name: str) -> dict[str, str]:
        tinker.delete(f"tinker://{model_id}/{kind}/{name}")
        return {}
